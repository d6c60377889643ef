"""Sliding windows, soft-caps, attention sinks and scales of their own, through the engine.

No backend of the CPU engine has all of them, so the models' own code in transformers says what is
right. Prompts are shorter than the window, longer, and longer than a page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.compare import Step, disagreements, generate, generate_by_transformers
from integration.engine import RealEngine
from integration.launch import options
from integration.tiny_models import GEMMA2, GRANITE_SWA, VOCAB, write_model

MODELS = {"gemma2": GEMMA2, "granite_swa": GRANITE_SWA}
PROMPTS = [
    [(7 * i + 3 * j) % (VOCAB - 10) + 5 for i in range(n)] for j, n in enumerate((5, 37, 150))
]
NEW_TOKENS = 6
# Two implementations of a whole model in bfloat16; and what MXFP8 adds to that.
TOLERANCES = {"bf16": 8 * 2**-6, "mxfp8": 16 * 2**-6}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random model."""
    return write_model(tmp_path_factory.mktemp("tiny") / request.param, MODELS[request.param])


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[Step]]:
    return generate_by_transformers(model, PROMPTS, NEW_TOKENS)


def changed(model: Path, **changes: object) -> list[list[Step]]:
    return generate_by_transformers(model, PROMPTS, NEW_TOKENS, **changes)


@pytest.mark.parametrize("recipe", TOLERANCES)
def test_equals_transformers(model: Path, expected: list[list[Step]], recipe: str) -> None:
    with RealEngine(options(model, recipe, skip_tokenizer_init=True)) as engine:
        found = generate(engine, PROMPTS, NEW_TOKENS)
        assert "layers have a sliding window" in engine.log
    assert not disagreements(found, expected, TOLERANCES[recipe])


def test_the_comparison_notices_a_missing_window(model: Path, expected: list[list[Step]]) -> None:
    for tolerance in TOLERANCES.values():
        assert len(disagreements(changed(model, sliding_window=4096), expected, tolerance)) == 2


def test_the_comparison_notices_a_window_one_too_long(
    model: Path, expected: list[list[Step]]
) -> None:
    assert disagreements(changed(model, sliding_window=17), expected, TOLERANCES["bf16"])


def test_the_comparison_notices_a_missing_soft_cap(tmp_path: Path) -> None:
    model = write_model(tmp_path, GEMMA2)
    expected, other = changed(model), changed(model, attn_logit_softcapping=None)
    for tolerance in TOLERANCES.values():
        assert disagreements(other, expected, tolerance)


def test_the_comparison_notices_missing_sinks(tmp_path: Path) -> None:
    with_sinks = changed(write_model(tmp_path / "with", GRANITE_SWA))
    without = changed(write_model(tmp_path / "without", GRANITE_SWA, sink_logit=-1e4))
    for tolerance in TOLERANCES.values():
        assert len(disagreements(without, with_sinks, tolerance)) == len(PROMPTS)
