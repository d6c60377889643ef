"""Rows of settings side by side, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.accuracy.measure import Row, Work, measure
from inkling_backend.accuracy.plot import plot
from inkling_backend.accuracy.settings import parse
from inkling_backend.accuracy.subject import Subject, cut, load, read_text

WORK = Work(chunk=48, chunks=2, needle_lengths=(700,))
NAMES = ("bf16", "mxfp8_q_bf16", "nvfp4", "nvfp4+center+rotate+fouroversix+sinks1")


@pytest.fixture(scope="module")
def rows(subject: Subject) -> list[Row]:
    settings, passed = [parse(name) for name in NAMES], []
    rows = list(measure(subject, read_text(None), settings, WORK, lambda: passed.append(1)))
    assert len(passed) == WORK.passes(settings)
    return rows


def test_rows_say_what_was_measured(rows: list[Row]) -> None:
    assert [row["setting"] for row in rows] == list(NAMES)
    for row in rows:
        assert row["tokens"] == 96
        assert row["needle"]["lengths"] == [700]
        assert len(row["needle"]["found"][0]) == len(row["needle"]["depths"]) == 5
        assert 0 <= row["top1"] <= 1
        assert row["perplexity"] > 1
    assert [row["bits"] for row in rows] == [16, 8.25, 4.5, 4.625]


def test_distances_are_in_order(rows: list[Row]) -> None:
    plain, eight, four, best = rows
    assert (plain["kl"], plain["top1"], plain["attention_error"]["mean"]) == (0, 1, 0)
    assert 0 < eight["kl"] < best["kl"] < four["kl"]
    assert 0 < eight["attention_error"]["mean"] < four["attention_error"]["mean"]
    assert [len(layer) for layer in four["attention_error"]["heads"]] == [4, 4]


def test_pictures_are_the_same_for_the_same_rows(rows: list[Row], tmp_path: Path) -> None:
    first = plot(rows, tmp_path / "a")
    assert [path.name for path in first] == ["kl.svg", "attention-error.svg"]
    for path, again in zip(first, plot(rows, tmp_path / "b"), strict=True):
        assert path.read_bytes() == again.read_bytes()


def test_chunks_follow_each_other(subject: Subject) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    ids = subject.encode(text)
    chunks = cut(subject, text, 5, 3)
    assert [chunk.tolist() for chunk in chunks] == [ids[:5], ids[5:10], ids[10:15]]
    with pytest.raises(AccuracyError, match="longer --text"):
        cut(subject, text, 14, 2)


def test_a_missing_model_or_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccuracyError, match=r"config\.json"):
        load(tmp_path / "nothing")
    with pytest.raises(AccuracyError, match="nothing"):
        read_text(tmp_path / "nothing")
