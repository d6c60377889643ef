"""Figures of the cache as Prometheus gauges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inkling_backend.engines.sglang import metrics, versions

prometheus = pytest.importorskip("prometheus_client", reason="comes with the engine")

FACTS = metrics.CacheFacts(
    "nvfp4", "bfloat16", "rotate", "max", 4, "triton", 36864, 1280, 640, 1408 * 36864, 77
)


def sample(name: str, **labels: str) -> float | None:
    return prometheus.REGISTRY.get_sample_value(name, {"model_name": "llama", **labels})


def report(monkeypatch: pytest.MonkeyPatch, facts: metrics.CacheFacts, **arguments: Any) -> None:
    served = SimpleNamespace(served_model_name="llama", **arguments)
    monkeypatch.setattr(versions, "active_server_args", lambda: served)
    metrics.report(facts)


def test_nothing_is_registered_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_gauge", lambda *args: pytest.fail("made a gauge"))
    report(monkeypatch, FACTS, enable_metrics=False)


def test_every_figure_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    report(monkeypatch, FACTS, enable_metrics=True)
    names = {"recipe": "nvfp4", "query": "bfloat16", "keys": "rotate", "kernels": "triton"}
    names |= {"nvfp4_scale": "max", "sink_tokens": "4"}
    assert sample(metrics.INFO, **names) == 1
    shown = {name: sample(name) for name in metrics.GAUGES}
    assert shown == {
        "inkling:kv_cache_bytes_per_token": 36864,
        "inkling:kv_cache_tokens": 1280,
        "inkling:kv_cache_window_tokens": 640,
        "inkling:kv_cache_bytes": 1408 * 36864,
        "inkling:workspace_bytes": 77,
    }
    # A second model runner of the same process sets them again.
    report(monkeypatch, FACTS._replace(workspace_bytes=78), enable_metrics=True)
    assert sample("inkling:workspace_bytes") == 78
