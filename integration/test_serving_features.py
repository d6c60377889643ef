"""Features of serving that the engine has by itself, over every recipe, against its own backend.

One engine for each recipe has them all at once, and one of the engine's own backend says what is
right: LoRA, chunks of prompts mixed with decode, the host tier, sleep, new weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.compare import Step, disagreements, steps_of
from integration.driverless import driverless
from integration.engine import RealEngine
from integration.launch import has_gpu, insist, options
from integration.tiny_models import VOCAB, write_adapter, write_model

pytestmark = pytest.mark.skipif(has_gpu(), reason="the stand-ins are for machines without a GPU")


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * i + 3 * seed) % (VOCAB - 10) + 5 for i in range(length)]


PROMPTS = [prompt(5, 0), prompt(37, 1), prompt(300, 2)]
NEW_TOKENS = 6
# Of 8 pages the prompts below take 15, so that the first is no longer in the pool at the end.
POOL_TOKENS = 1024
OTHERS = [prompt(300, seed) for seed in range(3, 8)]
HIT = 256  # tokens of the whole pages of 300
# What each cache adds to the logits of a tiny random model, in units of the last place of bfloat16.
_UNITS = {"bf16": 4, "mxfp8": 24, "mxfp8-nvfp4": 64, "nvfp4": 64, "kvfp4": 64, "mxfp4": 64}
TOLERANCES = {recipe: units * 2**-6 for recipe, units in _UNITS.items()}


@dataclass
class Seen:
    """What one engine said; ``host`` and ``asleep`` only of ours."""

    base: list[list[Step]] = field(default_factory=list)
    adapted: list[list[Step]] = field(default_factory=list)
    mixed: list[list[int]] = field(default_factory=list)
    decode_batches_while_mixed: int = 0
    fresh: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)
    bytes_lost: int = 0
    pool_bytes: int = 0
    woken: list[list[Step]] = field(default_factory=list)
    cached_after_update: int = -1
    updated: list[list[Step]] = field(default_factory=list)
    restored: list[list[Step]] = field(default_factory=list)


@dataclass(frozen=True)
class Models:
    """Directories of a model, of the same with other weights, and of an adapter of the first."""

    tiny: Path
    other: Path
    adapter: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("serving")
    tiny = write_model(folder / "tiny")
    other = write_model(folder / "other", seed=1)
    return Models(tiny, other, write_adapter(folder / "adapter", tiny))


def observe(models: Models, recipe: str | None, folder: Path, extra: Mapping[str, object]) -> Seen:
    """Start an engine and ask it for everything."""
    keywords: dict[str, object] = {
        "skip_tokenizer_init": True,
        "max_total_tokens": POOL_TOKENS,
        "lora_paths": [f"adapter={models.adapter}"],
        "lora_backend": "torch_native",
        "enable_mixed_chunk": True,
        "chunked_prefill_size": 256,  # two pages: one token of decode takes the room of a page
        "decode_log_interval": 1,
        **extra,
    }
    seen = Seen()
    with RealEngine(options(models.tiny, recipe, **keywords), env=driverless(folder)) as engine:
        seen.base = answers(engine)
        seen.adapted = answers(engine, lora_path=["adapter"] * len(PROMPTS))
        mix(engine, seen)
        evict(engine, seen)
        if recipe is not None:
            sleep(engine, seen)
        update(engine, seen, models)
    return seen


def answers(engine: RealEngine, **arguments: object) -> list[list[Step]]:
    return [steps_of(answer) for answer in ask(engine, PROMPTS, **arguments)]


def ask(engine: RealEngine, prompts: list[list[int]], **arguments: object) -> list[dict[str, Any]]:
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return engine.generate(
        input_ids=prompts,
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=8,
        **arguments,
    )


def mix(engine: RealEngine, seen: Seen) -> None:
    """A short answer goes on while a long prompt comes in chunks, if decode joins them."""
    engine.call("flush_cache")
    before = engine.log.count("Decode batch")
    greedy = {"temperature": 0, "ignore_eos": True}
    found = engine.call(
        "generate",
        input_ids=[PROMPTS[0], PROMPTS[2] * 2],
        sampling_params=[greedy | {"max_new_tokens": 3}, greedy | {"max_new_tokens": 1}],
    )
    seen.mixed = [answer["output_ids"] for answer in found]
    seen.decode_batches_while_mixed = engine.log.count("Decode batch") - before


def evict(engine: RealEngine, seen: Seen) -> None:
    """The same prompt twice, and in between more than the pool holds."""
    engine.call("flush_cache")
    (seen.fresh,) = ask(engine, PROMPTS[2:])
    for other in OTHERS:
        ask(engine, [other])
    (seen.again,) = ask(engine, PROMPTS[2:])


def sleep(engine: RealEngine, seen: Seen) -> None:
    engine.call("flush_cache")  # which waits for an idle engine, as sleep does not
    engine.call("release_memory_occupation", tags=["kv_cache"])
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    (lost,) = re.findall(r"memory saver: (\d+) bytes lost", engine.log)
    tokens = re.search(r"(\d+) bytes per token .* (\d+) tokens in the pool", engine.log)
    assert tokens is not None
    seen.bytes_lost, seen.pool_bytes = int(lost), int(tokens[1]) * int(tokens[2])
    seen.woken = answers(engine)


def update(engine: RealEngine, seen: Seen, models: Models) -> None:
    """Other weights from disk, then the first ones from tensors."""
    answers(engine)
    take_weights(engine, "update_weights_from_disk", model_path=str(models.other))
    found = ask(engine, PROMPTS)
    seen.cached_after_update = sum(answer["meta_info"]["cached_tokens"] for answer in found)
    seen.updated = [steps_of(answer) for answer in found]
    file = models.tiny / "model.safetensors"
    take_weights(engine, "update_weights_from_file", file=str(file))
    seen.restored = answers(engine)


def take_weights(engine: RealEngine, method: str, **arguments: object) -> None:
    """Update the weights; the engine fails to while its last batch is not yet closed."""

    def done() -> bool:
        succeeded, message, *_ = engine.call(method, **arguments)
        assert succeeded or "still running" in message, message
        return succeeded

    insist(done, method)


@pytest.fixture(scope="module")
def theirs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    extra = {"attention_backend": "torch_native"}
    return observe(models, None, tmp_path_factory.mktemp("theirs"), extra)


@pytest.fixture(scope="module")
def ours(models: Models, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    # The engine's own host pool, which a BF16 cache has, copies by kernels for GPUs.
    extra = {"enable_memory_saver": True, "enable_hierarchical_cache": recipe != "bf16"}
    return observe(models, recipe, tmp_path_factory.mktemp(recipe), extra)


def test_answers_agree(ours: Seen, theirs: Seen, recipe: str) -> None:
    assert not disagreements(ours.base, theirs.base, TOLERANCES[recipe])


def test_adapters(ours: Seen, theirs: Seen, recipe: str) -> None:
    assert not disagreements(ours.adapted, theirs.adapted, TOLERANCES[recipe])
    without = disagreements(theirs.base, theirs.adapted, TOLERANCES[recipe])
    assert len(without) == len(PROMPTS), "the comparison notices a missing adapter"


def test_decode_joins_the_chunks_of_a_prompt(ours: Seen) -> None:
    """No batch was of decode alone, and the answer goes on as it does alone."""
    assert ours.decode_batches_while_mixed == 0
    assert ours.mixed[0] == [step.token for step in ours.base[0]][:3]


def test_the_host_tier_gives_pages_back(ours: Seen, recipe: str) -> None:
    assert ours.fresh["meta_info"]["cached_tokens"] == 0
    # Without a host tier there is nothing left of the prompt.
    assert ours.again["meta_info"]["cached_tokens"] == (0 if recipe == "bf16" else HIT)
    assert steps_of(ours.again) == steps_of(ours.fresh)


def test_asleep_the_pool_is_given_away_and_awake_nothing_is_missed(ours: Seen) -> None:
    assert ours.bytes_lost > ours.pool_bytes > 0
    assert ours.woken == ours.base


def test_new_weights_find_no_old_pages(ours: Seen, theirs: Seen, recipe: str) -> None:
    assert ours.cached_after_update == 0
    assert not disagreements(ours.updated, theirs.updated, TOLERANCES[recipe])
    assert ours.restored == ours.base
    old = disagreements(theirs.base, theirs.updated, TOLERANCES[recipe])
    assert len(old) == len(PROMPTS), "the comparison notices old weights"


def test_layers_with_recipes_of_their_own(models: Models, theirs: Seen, tmp_path: Path) -> None:
    """Of the two layers one is in NVFP4, and both have sink tokens: every feature takes them as
    they are."""
    extra: dict[str, object] = {"enable_memory_saver": True, "enable_hierarchical_cache": True}
    extra |= {"inkling_layer_recipes": "1:nvfp4", "inkling_sink_tokens": 2}
    seen = observe(models, "mxfp8", tmp_path, extra)
    tolerance = TOLERANCES["nvfp4"]
    assert not disagreements(seen.base, theirs.base, tolerance)
    assert not disagreements(seen.adapted, theirs.adapted, tolerance)
    assert seen.mixed[0] == [step.token for step in seen.base[0]][:3]
    assert seen.again["meta_info"]["cached_tokens"] == HIT
    assert steps_of(seen.again) == steps_of(seen.fresh)
    assert seen.woken == seen.base
    assert not disagreements(seen.updated, theirs.updated, tolerance)
    assert seen.restored == seen.base
