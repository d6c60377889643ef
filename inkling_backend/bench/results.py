"""Results as data: facts about the host, and JSON files that are whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from inkling_backend.errors import InklingError

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]

# Key in a file of results -> names of the distribution that may provide it.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "flashinfer": ("flashinfer-python",),
    "fa3": ("tokenspeed-fa3", "flash-attn-3"),
}
# What makes a row the same row in another file.
IDENTITY = (
    *("op", "format", "backend", "batch", "context", "new_tokens", "q_heads", "kv_heads"),
    *("head_dim", "page_size", "ragged", "store", "tp"),
)
# Peers that read a BF16 cache: the yardstick.
BF16_PEERS = ("flashinfer_bf16", "fa3_bf16", "torch_bf16")

Row = dict[str, Any]


class ResultsError(InklingError, ValueError):
    """A file is not one of results."""


def gpu() -> dict[str, str]:
    """``gpu`` and ``driver`` of the first GPU, from the driver's own tool.

    Raises:
        OSError, subprocess.CalledProcessError: the tool is not there, or finds no GPU.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver = (part.strip() for part in first.split(","))
    return {"gpu": name, "driver": driver}


def versions(keys: Iterable[str]) -> dict[str, str]:
    """Version of each library of `LIBRARIES` that is installed."""
    found = {}
    for key in keys:
        for name in LIBRARIES[key]:
            try:
                found[key] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def commit(root: Path) -> str:
    """The commit under test: $COMMIT, else what git says of this checkout, else "unknown"."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    # An installed package may lie inside some other project's checkout.
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def header(host: Mapping[str, str], root: Path = ROOT) -> dict[str, Any]:
    """What every report begins with: schema, date, commit of the checkout ``root`` and host."""
    now = datetime.now(UTC)
    return {
        "schema": SCHEMA,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(root),
        "host": dict(host),
    }


def write_json(path: Path, content: object) -> Path:
    """Write a file whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    Path(file.name).chmod(0o644)
    return Path(file.name).replace(path)


class Results:
    """Rows of one run, in a file after every row if there is a path."""

    def __init__(self, host: Mapping[str, str], path: Path | None = None) -> None:
        self._header = header(host)
        self._path = path
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        if self._path is not None:
            write_json(self._path, {**self._header, "rows": self.rows})


def read(path: Path) -> dict[str, Any]:
    """A file of results.

    Raises:
        ResultsError: it cannot be read, or is of another kind.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: expected a JSON file of results, got {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or "rows" not in content:
        raise ResultsError(f"{path}: expected results of schema {SCHEMA} with rows")
    return content


def identity(row: Row) -> tuple[tuple[str, Any], ...]:
    """What a row measures, hashable."""
    quantized = (("query", "mxfp8"),) if row.get("query") == "mxfp8" else ()
    return (*((key, row[key]) for key in IDENTITY if key in row), *quantized)


def best_bf16_peer(row: Row) -> float | None:
    """Microseconds of the fastest peer over a BF16 cache, None if none was measured."""
    peers = row.get("peers", {})
    return min((peers[name] for name in BF16_PEERS if name in peers), default=None)
