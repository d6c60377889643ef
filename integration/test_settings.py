"""Settings that trade speed for accuracy or back, through the engine with the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.engine import EngineFailed, RealEngine
from integration.launch import options
from integration.model import QUESTION
from integration.probe import Probe
from integration.tiny_models import GEMMA2, GRANITE_SWA, write_model

# About 270 tokens: whole pages of it stay in the prefix cache.
LONG = (
    "The river rises in the hills north of the town and flows south through three lakes before "
    "it meets the sea. "
) * 12 + "In winter the lakes"
FIXED = "centers of K are fixed from now on"


def test_queries_in_mxfp8(model: Path) -> None:
    with RealEngine(options(model, "mxfp8", inkling_query_dtype="mxfp8")) as engine:
        assert "queries in mxfp8" in engine.log
        assert "Paris" in engine.ask(QUESTION)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_keys_are_centered_and_rotated(model: Path, recipe: str, tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    chosen = options(model, recipe, inkling_key_transform="center+rotate")
    with RealEngine(chosen, env=probe.env) as engine:
        assert "keys under center+rotate" in engine.log
        prompt = engine.encode(LONG)
        few = engine.encode("The capital of Italy is")
        engine.tokens([few], 6)
        assert FIXED not in engine.log, "a few tokens fix no center"
        params = {"max_new_tokens": 12, "ignore_eos": True}
        (miss,) = engine.generate(input_ids=[prompt], sampling_params=params)
        assert engine.log.count(FIXED) == 1
        (hit,) = engine.generate(input_ids=[prompt], sampling_params=params)
        assert miss["meta_info"]["cached_tokens"] == 0
        assert hit["meta_info"]["cached_tokens"] >= 256
        assert hit["output_ids"] == miss["output_ids"]
        short = engine.tokens([few], 6)
        assert "Paris" in engine.ask(QUESTION)
        engine.call("flush_cache")
        (again,) = engine.generate(input_ids=[prompt], sampling_params=params)
        assert again["output_ids"] == miss["output_ids"]
        assert engine.tokens([few], 6) == short
        assert engine.log.count(FIXED) == 1, "centers are fixed for the pool's life"
        assert probe.padding_is_untouched
    pool = probe.pool
    slots = pool["tokens"] + pool["page_size"]
    centers = 30 * 3 * 64 * 4
    beyond = pool["nbytes"] - slots * pool["bytes_per_token"] - centers
    assert 0 <= beyond <= 16 * 1024


def test_nvfp4_blocks_are_scaled_to_four_or_six(model: Path) -> None:
    seen = {}
    for scale in ("max", "fouroversix"):
        with RealEngine(options(model, "nvfp4", inkling_nvfp4_scale=scale)) as engine:
            assert ("NVFP4 scales by fouroversix" in engine.log) is (scale == "fouroversix")
            assert "Paris" in engine.ask(QUESTION)
            prompt = engine.encode(LONG)
            miss, hit = (engine.tokens([prompt], 12) for _ in range(2))
            assert miss == hit
            answer = engine.generate(
                input_ids=[prompt], sampling_params={"max_new_tokens": 1}, return_logprob=True
            )
            seen[scale] = answer[0]["meta_info"]["output_token_logprobs"]
    assert seen["max"] != seen["fouroversix"], "the store took the other rule"


def test_of_the_mixed_recipe_v_is_scaled_to_four_or_six(model: Path) -> None:
    with RealEngine(options(model, "mxfp8-nvfp4", inkling_nvfp4_scale="fouroversix")) as engine:
        assert "NVFP4 scales by fouroversix" in engine.log
        assert "Paris" in engine.ask(QUESTION)


def test_layers_have_recipes_of_their_own(model: Path, tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    recipes = "0-1:mxfp8,7:bf16,29:mxfp8-nvfp4"
    chosen = options(model, "nvfp4", inkling_layer_recipes=recipes)
    with RealEngine(chosen, env=probe.env) as engine:
        # One head of 64: 36 bytes in NVFP4, 66 in MXFP8, 128 in BF16.
        sizes = {26: 72, 2: 132, 1: 256}
        total = 3 * (26 * 72 + 2 * 132 + 256 + 66 + 36)
        assert f"KV cache recipe nvfp4 with layers {recipes}, {total} bytes per" in engine.log
        for layers, size in sizes.items():
            assert f"{layers} " in engine.log
            assert f"of {3 * size}" in engine.log
        prompt = engine.encode(LONG)
        miss, hit = (engine.tokens([prompt], 12) for _ in range(2))
        assert miss == hit
        assert "Paris" in engine.ask(QUESTION)
        engine.call("flush_cache")
        assert engine.tokens([prompt], 12) == miss
        assert probe.padding_is_untouched
    pool = probe.pool
    assert pool["bytes_per_token"] == total
    beyond = pool["nbytes"] - (pool["tokens"] + pool["page_size"]) * total
    assert 0 <= beyond <= 16 * 1024


def test_sink_tokens_are_read_in_bf16(model: Path, tmp_path: Path) -> None:
    probe, seen = Probe(tmp_path), []
    for sinks in (0, 4):
        chosen = options(model, "nvfp4", inkling_sink_tokens=sinks, inkling_key_transform="rotate")
        with RealEngine(chosen, env=probe.env) as engine:
            assert ("sink tokens 4" in engine.log) is (sinks == 4)
            assert "Paris" in engine.ask(QUESTION)
            prompt = engine.encode(LONG)
            params = {"max_new_tokens": 12, "ignore_eos": True}
            (miss,) = engine.generate(input_ids=[prompt], sampling_params=params)
            (hit,) = engine.generate(input_ids=[prompt], sampling_params=params)
            assert hit["meta_info"]["cached_tokens"] >= 256
            assert hit["output_ids"] == miss["output_ids"]
            engine.call("flush_cache")
            assert probe.padding_is_untouched
            answer = engine.generate(
                input_ids=[prompt], sampling_params={"max_new_tokens": 1}, return_logprob=True
            )
            seen.append(answer[0]["meta_info"]["output_token_logprobs"])
        pool = probe.pool
        # Of 3 heads of 64: 36 bytes in NVFP4, and in BF16 128 of 4 tokens a page of 128.
        assert pool["bytes_per_token"] == 30 * 2 * 3 * (36 + sinks)
        beyond = pool["nbytes"] - (pool["tokens"] + pool["page_size"]) * pool["bytes_per_token"]
        assert 0 <= beyond <= 16 * 1024
    assert seen[0] != seen[1], "the rows in BF16 were read"


@pytest.mark.parametrize("config", [GEMMA2, GRANITE_SWA], ids=["soft-cap", "sinks"])
def test_centers_are_refused_where_the_shift_shows(
    config: dict[str, object], tmp_path: Path
) -> None:
    model = write_model(tmp_path, config)
    chosen = options(model, skip_tokenizer_init=True, inkling_key_transform="center")
    with pytest.raises(EngineFailed, match="a center of the keys"):
        RealEngine(chosen)
