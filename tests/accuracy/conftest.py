"""One tiny model for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from inkling_backend.accuracy.subject import Subject, load
from tests.accuracy import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return tiny.save(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def subject(tiny_model: Path) -> Subject:
    """The model, loaded."""
    return load(tiny_model, "cpu")
