"""Pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.world import make_row

pytest.importorskip("matplotlib", reason="pictures need the bench extra's matplotlib")

from inkling_backend.bench.plot import plot


def test_every_picture(tmp_path: Path) -> None:
    rows = [
        make_row(format=name, batch=batch, context=context, us=batch * context / 1000)
        for name in ("mxfp8", "nvfp4")
        for batch, context in ((64, 8192), (64, 1024), (1, 8192))
    ]
    content = {"host": {"gpu": "NVIDIA H200"}, "date": "2026-01-02T00:00:00", "rows": rows}
    written = plot([content], tmp_path / "out")
    names = {path.name for path in written}
    assert names == {"decode-time.svg", "decode-roofline.svg", "decode-speedup.svg"}
    for path in written:
        text = path.read_text()
        assert "<svg" in text
        assert len(text) > 5000


def test_rows_without_times_or_peers(tmp_path: Path) -> None:
    failed = make_row(us=None, gate="fail")
    alone = make_row(op="store", peers=None, bytes=None)
    written = plot([{"rows": [failed, alone]}], tmp_path)
    assert [path.name for path in written] == ["store-time.svg"]
