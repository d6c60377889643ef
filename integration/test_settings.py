"""Settings that trade speed for accuracy or back, through the engine with the real model."""

from __future__ import annotations

from pathlib import Path

from integration.engine import RealEngine
from integration.launch import options

QUESTION = "What is the capital of France?"


def test_queries_in_mxfp8(model: Path) -> None:
    with RealEngine(options(model, "mxfp8", inkling_query_dtype="mxfp8")) as engine:
        assert "queries in mxfp8" in engine.log
        assert "Paris" in engine.ask(QUESTION)
