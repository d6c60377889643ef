"""Fixtures: the real model, and one running engine for each recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.engine import RealEngine
from integration.launch import RECIPES, options
from integration.model import DEFAULT_OUT, prepare
from integration.probe import Probe


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of SmolLM2-135M-Instruct."""
    return prepare(Path(os.environ.get("MODEL", DEFAULT_OUT)))


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    """Every recipe in turn; all tests of one recipe share its engine."""
    return request.param


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory, recipe: str) -> Probe:
    """What the engine of the recipe says about its own pool."""
    return Probe(tmp_path_factory.mktemp(f"probe-{recipe}"))


@pytest.fixture(scope="module")
def engine(model: Path, recipe: str, probe: Probe) -> Iterator[RealEngine]:
    """The real engine with the real model and the recipe."""
    with RealEngine(options(model, recipe), env=probe.env) as running:
        yield running
