"""Layers with a window in a pool of their own, far smaller than a prompt, through the engine.

The engine's default for the model. Beside it the same engine with one pool for all layers: both
must say the same, whatever was given back and handed out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.engine import RealEngine
from integration.launch import options
from integration.probe import Probe
from integration.test_generation import FIXED_BYTES
from integration.tiny_models import GRANITE_SWA, VOCAB, write_model

# Global scales and sink tokens, too: each pool has its own.
RECIPE, SINK_TOKENS = "nvfp4", 3
TOKENS, PAGE = 4096, 128
# Six pages for layers with a window.
RATIO = 0.2
LONG = [(7 * i * i + 3 * i) % (VOCAB - 10) + 5 for i in range(900)]
# Prompt and new tokens, one after the other: more than the pool for windows holds, in chunks; a hit
# in the prefix cache; a short prompt whose decode passes its window and several pages.
REQUESTS = [(LONG, 8), ([*LONG, 9, 8, 7], 8), (LONG[100:140], 300), (LONG[40:700], 8)]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return Probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "granite_swa", GRANITE_SWA)


def start(model: Path, probe: Probe | None, **keywords: Any) -> RealEngine:
    keywords |= {"inkling_sink_tokens": SINK_TOKENS, "chunked_prefill_size": 2 * PAGE}
    chosen = options(model, RECIPE, skip_tokenizer_init=True, **keywords)
    return RealEngine(chosen, env=probe.env if probe else None)


@pytest.fixture(scope="module")
def two_pools(tiny: Path, probe: Probe) -> Iterator[RealEngine]:
    with start(tiny, probe, swa_full_tokens_ratio=RATIO) as engine:
        yield engine


def answers(engine: RealEngine) -> tuple[list[list[int]], list[int]]:
    """Tokens of every request, and how many tokens of its prompt were in the prefix cache."""
    found = [
        engine.generate(
            input_ids=[prompt], sampling_params={"max_new_tokens": count, "ignore_eos": True}
        )[0]
        for prompt, count in REQUESTS
    ]
    return (
        [answer["output_ids"] for answer in found],
        [answer["meta_info"]["cached_tokens"] for answer in found],
    )


def test_two_pools_say_what_one_says(tiny: Path, two_pools: RealEngine, probe: Probe) -> None:
    tokens, cached = answers(two_pools)
    assert [len(each) for each in tokens] == [count for _, count in REQUESTS]
    assert cached[1] == len(LONG) // PAGE * PAGE
    pools = probe.pools
    assert [pool["tokens"] for pool in pools] == [TOKENS, int(TOKENS * RATIO) // PAGE * PAGE]
    assert len(LONG) > pools[1]["tokens"], "no page for windows would be given back"
    with start(tiny, None, disable_hybrid_swa_memory=True) as one_pool:
        assert answers(one_pool) == (tokens, cached)
        assert "their pages are kept for the whole context" in one_pool.log


def test_page_0_of_both_pools_is_untouched(two_pools: RealEngine, probe: Probe) -> None:
    two_pools.call("flush_cache")
    assert probe.padding_is_untouched


def test_both_pools_take_the_bytes_that_sizing_computed(
    two_pools: RealEngine, probe: Probe
) -> None:
    for pool in probe.pools:
        slots = pool["tokens"] + pool["page_size"]
        assert 0 <= pool["nbytes"] - slots * pool["bytes_per_token"] <= FIXED_BYTES


def test_the_log_says_what_both_pools_are(two_pools: RealEngine, probe: Probe) -> None:
    whole, windows = probe.pools
    told = re.search(r"(\d+) bytes per token \(1 layers .* (\d+) tokens in the pool", two_pools.log)
    assert told is not None
    assert list(map(int, told.groups())) == [whole["bytes_per_token"], whole["tokens"]]
    told = re.search(
        r"2 of 3 layers .* (\d+) bytes of a token .* (\d+) tokens in it", two_pools.log
    )
    assert told is not None
    assert list(map(int, told.groups())) == [windows["bytes_per_token"], windows["tokens"]]
