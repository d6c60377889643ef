"""What needs a model of a special shape or a special engine: parallel ranks, interpreted kernels,
retraction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.compare import Step, disagreements, generate
from integration.engine import RealEngine
from integration.gpu.parallel import run_parallel
from integration.launch import options
from integration.tiny_models import VOCAB, write_model

PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 5 for i in range(n)] for j, n in enumerate((5, 37, 9))]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 4 query heads and 2 KV heads."""
    return write_model(tmp_path_factory.mktemp("tiny"))


def tiny_options(tiny: Path, recipe: str = "mxfp8", **extra: object) -> dict[str, object]:
    return options(tiny, recipe, skip_tokenizer_init=True, **extra)


@pytest.fixture(scope="module")
def single(tiny: Path) -> Iterator[RealEngine]:
    """MXFP8 on one rank with the reference path, and room for all requests at once."""
    with RealEngine(tiny_options(tiny)) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(single: RealEngine) -> list[list[Step]]:
    return generate(single, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def expected_nvfp4(tiny: Path) -> list[list[Step]]:
    with RealEngine(tiny_options(tiny, "nvfp4")) as engine:
        return generate(engine, PROMPTS, NEW_TOKENS)


def test_the_comparison_tells_recipes_apart(
    expected: list[list[Step]], expected_nvfp4: list[list[Step]]
) -> None:
    """The tolerance below is smaller than what a change of the cache's numbers does."""
    assert len(disagreements(expected, expected_nvfp4)) == len(PROMPTS)


def test_identical_prompts_get_one_answer(single: RealEngine) -> None:
    """Two hundred at once: in batches of many sizes, as the pool has room for some thirty."""
    prompt = PROMPTS[1]
    answers = single.tokens([prompt] * 200, 8)
    assert len(answers) == 200
    assert {tuple(answer) for answer in answers} == {tuple(answers[0])}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Tensor-parallel, pipeline, and data-parallel attention of which one rank idles."""
    cases = list(run_parallel(tmp_path, ("mxfp8",)))
    assert len(cases) >= 6
    assert [each for each in cases if each.status != "pass"] == []


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_interpreted_kernels_equal_the_reference(
    tiny: Path, recipe: str, request: pytest.FixtureRequest
) -> None:
    reference = {"mxfp8": "expected", "nvfp4": "expected_nvfp4"}[recipe]
    env = {"TRITON_INTERPRET": "1", "INKLING_KERNELS": "triton"}
    with RealEngine(tiny_options(tiny, recipe), env=env) as engine:
        (line,) = [line for line in engine.log.splitlines() if "bytes per token" in line]
        assert "triton" in line.lower()
        found = generate(engine, PROMPTS, NEW_TOKENS)
    assert not disagreements(found, request.getfixturevalue(reference))


def test_retracted_requests_end_as_they_would_alone(tiny: Path, single: RealEngine) -> None:
    """The engine takes a running request's pages away every few steps and computes them again."""
    prompts = [PROMPTS[0] + [9 + i] for i in range(4)]
    alone = [steps for prompt in prompts for steps in generate(single, [prompt], 24)]
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    with RealEngine(tiny_options(tiny), env=env) as engine:
        together = generate(engine, prompts, 24)
        assert re.search(r"retraction.*#retracted_reqs: [1-9]", engine.log)
    assert not disagreements(together, alone)
