"""Two files of results, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inkling_backend.bench.cases import short
from inkling_backend.bench.results import Row, identity


@dataclass(frozen=True)
class Pair:
    """One row in both files.

    Attributes:
        before, after: microseconds, None where the row has no time.
    """

    row: Row
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """Time after over time before, None if one is missing."""
        if self.before is None or self.after is None:
            return None
        return self.after / self.before

    def is_worse(self, tolerance: float) -> bool:
        """Whether it got slower by more than ``tolerance`` (0.05 is 5 %), or lost its time."""
        if self.ratio is None:
            return self.before is not None
        return self.ratio > 1 + tolerance


@dataclass(frozen=True)
class Comparison:
    """Rows of both files, and names of rows that only one has."""

    pairs: list[Pair]
    only_before: list[str]
    only_after: list[str]

    def passed(self, tolerance: float) -> bool:
        """Whether there is something to compare, and no row got worse."""
        return bool(self.pairs) and not any(pair.is_worse(tolerance) for pair in self.pairs)


def compare(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Match the rows of two files by what they measure."""
    old, new = ({identity(row): row for row in content["rows"]} for content in (before, after))
    pairs = [Pair(row, row.get("us"), new[key].get("us")) for key, row in old.items() if key in new]
    return Comparison(
        pairs,
        [label(row) for key, row in old.items() if key not in new],
        [label(row) for key, row in new.items() if key not in old],
    )


def label(row: Row) -> str:
    """A row's name for people."""
    text = f"{row['op']} {row.get('backend', '')} {row['format']} {row['batch']}x"
    text = " ".join(text.split()) + short(row["context"])
    if "new_tokens" in row:
        text += f" {short(row['new_tokens'])} new"
    if row.get("query") == "mxfp8":
        text += " query mxfp8"
    if "tp" in row:
        text += f" tp {row['tp']}"
    return text + "".join(f" {name}" for name in ("ragged", "store") if row.get(name))
