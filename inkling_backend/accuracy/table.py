"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from inkling_backend.accuracy.measure import Row


def line(row: Row) -> str:
    """One row in one line, for progress."""
    return f"{row['setting']}: KL {row['kl']:.5f}, perplexity {row['perplexity']:.3f}"


def results_table(rows: Sequence[Row]) -> Table:
    """Distance from the BF16 cache, needles found and error of the attention output."""
    table = Table("setting", "bits", "KL", "perplexity", "top-1", "needles", "attention error")
    for row in rows:
        table.add_row(
            row["setting"].replace("+", " +"),
            f"{row['bits']:g}",
            f"{row['kl']:.5f}",
            f"{row['perplexity']:.3f}",
            f"{row['top1']:.3f}",
            f"{row['needle']['score']:.2f}" if "needle" in row else "",
            f"{row['attention_error']['mean']:.4f}",
        )
    return table
