"""What `inkling-backend bench engine` does to an engine, to a real one on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from inkling_backend.bench import engine
from integration.launch import environment, options
from integration.tiny_models import LLAMA, write_model


def test_steps_and_tokens_of_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    keywords = options(
        write_model(tmp_path, LLAMA | {"vocab_size": 1024}), "mxfp8", skip_tokenizer_init=True
    )
    job = {"engine": keywords, "shapes": [(1, 64), (3, 128)], "prompt_tokens": 96}
    rows = list(engine.measure(job))
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 64), (3, 128)]
    assert {row["kv_tokens"] for row in rows} == {keywords["max_total_tokens"]}
    # A step of a tiny model takes about a millisecond; what is no step takes seconds or nothing.
    assert all(100 < row["us"] < 5e6 for row in rows)
    assert all(0.1 < row["ttft_ms"] < 5e4 for row in rows)
