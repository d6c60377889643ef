"""Comparing files of results."""

from __future__ import annotations

from inkling_backend.bench.compare import compare, label
from inkling_backend.bench.results import Row
from tests.bench.world import make_row


def passed(before: list[Row], after: list[Row], tolerance: float = 0.05) -> bool:
    return compare({"rows": before}, {"rows": after}).passed(tolerance)


def test_slower_beyond_the_tolerance_fails() -> None:
    before = [make_row(), make_row(batch=1, us=10.0)]
    assert passed(before, before)
    assert passed(before, [make_row(us=314.0), make_row(batch=1, us=5.0)])
    assert not passed(before, [make_row(us=316.0), make_row(batch=1, us=5.0)])
    assert passed(before, [make_row(us=316.0), make_row(batch=1, us=5.0)], tolerance=0.1)


def test_a_lost_time_fails_and_a_gained_one_does_not() -> None:
    lost = make_row(us=None, gate="fail")
    assert not passed([make_row()], [lost])
    assert passed([lost], [make_row()])
    assert passed([lost], [lost])


def test_nothing_in_common_fails() -> None:
    result = compare({"rows": [make_row(batch=1)]}, {"rows": [make_row(batch=2)]})
    assert not result.passed(1.0)
    assert result.only_before == ["decode mxfp8 1x8k"]
    assert result.only_after == ["decode mxfp8 2x8k"]


def test_queries_in_mxfp8_are_another_row() -> None:
    plain, quantized = make_row(query="bf16"), make_row(query="mxfp8")
    assert compare({"rows": [make_row()]}, {"rows": [plain]}).pairs
    result = compare({"rows": [plain]}, {"rows": [quantized]})
    assert not result.pairs
    assert result.only_after == ["decode mxfp8 64x8k query mxfp8"]


def test_labels() -> None:
    assert label(make_row(ragged=True, store=True)) == "decode mxfp8 64x8k ragged store"
    assert label(make_row(op="extend", batch=1, new_tokens=2048)) == "extend mxfp8 1x8k 2k new"
    assert label(make_row(op="engine_decode", backend="fa3")) == "engine_decode fa3 mxfp8 64x8k"
