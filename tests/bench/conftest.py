"""Sizes that the CPU can fill quickly."""

from __future__ import annotations

import pytest

from inkling_backend.bench import data, peer_calls


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "STORE_SLOTS", 256)
    monkeypatch.setattr(peer_calls, "WORKSPACE_BYTES", 1 << 16)
