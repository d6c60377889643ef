"""The real model in every recipe: right answers, the same answer however the work was cut."""

from __future__ import annotations

import re
import time
from pathlib import Path

from inkling_backend.cli.model import read_model
from inkling_backend.cli.plan import plan
from integration.engine import RealEngine
from integration.launch import options
from integration.model import QUESTION
from integration.probe import Probe

# About 270 tokens: more than two pages of 128, and not a whole number of them.
LONG = (
    "The river rises in the hills north of the town and flows south through three lakes before "
    "it meets the sea. "
) * 12 + "In winter the lakes"
PROMPTS = [
    "The capital of Italy is",
    LONG,
    "Water boils at",
    "My favourite season is spring, because in spring the days grow longer and",
]
# Bytes of small tensors that do not grow with the pool, such as one global scale per layer.
FIXED_BYTES = 16 * 1024


def test_the_answer_names_paris(engine: RealEngine) -> None:
    assert "Paris" in engine.ask(QUESTION)


def test_sixteen_tokens_come_within_ten_seconds(engine: RealEngine) -> None:
    prompt = engine.encode("Once upon a time")
    start = time.monotonic()
    (tokens,) = engine.tokens([prompt], 16)
    seconds = time.monotonic() - start
    assert len(tokens) == 16
    assert seconds < 10


def test_prefix_hit_equals_miss(engine: RealEngine) -> None:
    prompt = engine.encode(LONG)
    params = {"max_new_tokens": 12, "ignore_eos": True}
    engine.call("flush_cache")
    (miss,) = engine.generate(input_ids=[prompt], sampling_params=params)
    (hit,) = engine.generate(input_ids=[prompt], sampling_params=params)
    assert miss["meta_info"]["cached_tokens"] == 0
    assert hit["meta_info"]["cached_tokens"] >= 256
    assert hit["output_ids"] == miss["output_ids"]


def test_an_answer_does_not_depend_on_the_batch(engine: RealEngine) -> None:
    """Always two requests at least: torch's CPU product of bfloat16 matrices rounds one row alone
    (the MLP's, in decode) otherwise than the same row among others."""
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    partner = engine.encode("The sun rises in the")
    paired = []
    for prompt in prompts:
        engine.call("flush_cache")
        paired += engine.tokens([prompt, partner], 8)[:1]
    engine.call("flush_cache")
    assert engine.tokens(prompts, 8) == paired


def test_chunked_prefill_equals_unchunked(model: Path, recipe: str, engine: RealEngine) -> None:
    prompt = engine.encode(LONG)
    engine.call("flush_cache")
    whole = engine.tokens([prompt], 12)
    with RealEngine(options(model, recipe, chunked_prefill_size=128)) as chunked:
        assert chunked.tokens([prompt], 12) == whole
        pieces = re.findall(r"Prefill batch.*#new-token: (\d+)", chunked.log)
    assert max(int(piece) for piece in pieces) <= 128


def test_pool_takes_the_bytes_that_sizing_computed(probe: Probe, engine: RealEngine) -> None:
    pool = probe.pool
    slots = pool["tokens"] + pool["page_size"]  # the padding page is not for tokens
    beyond = pool["nbytes"] - slots * pool["bytes_per_token"]
    assert 0 <= beyond <= FIXED_BYTES


def test_plan_has_the_pools_bytes_per_token(
    model: Path, recipe: str, probe: Probe, engine: RealEngine
) -> None:
    planned = plan(read_model(model), memory_bytes=8 * 2**30).row(recipe)
    assert planned.bytes_per_token == probe.pool["bytes_per_token"]


def test_the_log_says_what_the_cache_is(recipe: str, probe: Probe, engine: RealEngine) -> None:
    lines = [line for line in engine.log.splitlines() if "bytes per token" in line]
    assert len(lines) == 1
    (line,) = lines
    for fact in (recipe, str(probe.pool["bytes_per_token"]), str(probe.pool["tokens"])):
        assert fact in line
