"""Rows of results as a table for people."""

from __future__ import annotations

from rich.table import Table

from inkling_backend.bench import look
from inkling_backend.bench.compare import Comparison, label
from inkling_backend.bench.results import Row, best_bf16_peer


def line(row: Row) -> str:
    """One row in one line, for progress."""
    if "us" not in row:
        return f"{label(row)}: failed"
    return f"{label(row)}: {row['us']:.1f} us"


def results_table(rows: list[Row]) -> Table:
    """Time, time under load, times against the best BF16 peer, and share of the copy's speed."""
    table = look.table("", "us", "sustained", "best BF16\npeer", "faster", "of copy\nspeed")
    for row in rows:
        if "us" not in row:
            table.add_row(label(row), "[red]failed[/]", "", "", "", "")
            continue
        peer = best_bf16_peer(row)
        table.add_row(
            label(row),
            f"{row['us']:.1f}",
            f"{row['us_sustained']:.1f}" if "us_sustained" in row else "",
            "" if peer is None else f"{peer:.1f}",
            "" if peer is None else f"{peer / row['us']:.2f}x",
            f"{row['copy_us'] / row['us']:.2f}" if "copy_us" in row else "",
        )
    return table


def engine_table(rows: list[Row]) -> Table:
    """Decode step, time to first token and size of the pool of each engine."""
    table = look.table("", "step us", "first\ntoken ms", "KV tokens", "best BF16\npeer", "faster")
    for row in rows:
        peer = best_bf16_peer(row)
        table.add_row(
            label(row),
            f"{row['us']:.0f}",
            f"{row['ttft_ms']:.0f}",
            f"{row['kv_tokens']:,}",
            "" if peer is None else f"{peer:.0f}",
            "" if peer is None else f"{peer / row['us']:.2f}x",
        )
    return table


def comparison_table(comparison: Comparison, tolerance: float) -> Table:
    """Before, after and their ratio, worse rows marked."""
    table = look.table("", "before us", "after us", "after / before")
    for pair in comparison.pairs:
        color = "[red]" if pair.is_worse(tolerance) else ""
        cells = [f"{us:.1f}" if us is not None else "-" for us in (pair.before, pair.after)]
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.3f}"
        table.add_row(label(pair.row), *cells, f"{color}{ratio}")
    return table
