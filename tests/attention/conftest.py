"""What the tests of the runner choose by environment variables."""

from __future__ import annotations

import pytest


@pytest.fixture
def triton_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way to extend has tests of its own."""
    monkeypatch.setenv("INKLING_EXTEND", "triton")


@pytest.fixture(params=["triton", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `AttentionRunner` runs."""
    monkeypatch.setenv("INKLING_KERNELS", request.param)
    return request.param
