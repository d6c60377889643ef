"""Tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from inkling_backend.bench import table
from inkling_backend.bench.compare import compare
from tests.bench.world import make_row


def text_of(made: Table) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    return console.export_text()


def test_rows_show_ratios() -> None:
    text = text_of(table.results_table([make_row(), make_row(batch=1, us=None, gate="fail")]))
    for expected in ("300.0", "310.0", "496.0", "1.65x", "0.87", "failed"):
        assert expected in text


def test_rows_without_peers() -> None:
    text = text_of(table.results_table([make_row(peers=None, us_sustained=None, copy_us=None)]))
    assert "300.0" in text
    assert "x " not in text.replace("64x8k", "")


def test_engines() -> None:
    row = make_row(op="engine_decode", backend="inkling", us=15000.0, ttft_ms=210.4, kv_tokens=9000)
    text = text_of(table.engine_table([row]))
    for expected in ("15000", "210", "9,000"):
        assert expected in text


def test_comparisons_mark_what_got_worse() -> None:
    result = compare({"rows": [make_row()]}, {"rows": [make_row(us=330.0)]})
    text = text_of(table.comparison_table(result, 0.05))
    assert "1.100" in text


def test_lines_of_progress() -> None:
    assert table.line(make_row()) == "decode mxfp8 64x8k: 300.0 us"
    assert table.line(make_row(us=None)) == "decode mxfp8 64x8k: failed"
