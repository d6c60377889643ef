"""The newest committed results of each kind.

A file of `inkling-backend bench` is kept as ``benchmarks/results/DATE-GPU-KIND.json``, like
``2026-11-30-h200-decode.json``; the kind is the command, with its flags where it had any
(``decode-store``). A number at the end tells files of one day apart.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from inkling_backend.bench.results import Row, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "integration" / "benchmarks" / "results"
REPORTS = ROOT / "integration" / "reports"
ACCURACY = ROOT / "integration" / "accuracy" / "results" / "smollm2.json"
# Kinds of one operation as it is by default: these have pictures.
DRAWN = ("decode", "verify", "extend", "store", "engine")
_NAME = re.compile(
    rf"\d{{4}}-\d{{2}}-\d{{2}}-.+?-(?P<kind>(?:{'|'.join(DRAWN)}|quick)(?:-[a-z][a-z0-9]*)*)(?:-\d+)?"
    r"\.json"
)

# Setting of `inkling-backend accuracy` that simulates a recipe, where it is not called like it;
# ``mxfp8_q_mxfp8`` is the recipe with queries in MXFP8.
_SETTINGS = {
    "mxfp8-nvfp4": "k_mxfp8_v_nvfp4",
    "mxfp4": "mxfp4_block32",
    "mxfp8": "mxfp8_q_bf16",
    "mxfp8_q_mxfp8": "mxfp8",
}


def newest(folder: Path = RESULTS) -> dict[str, Path]:
    """The newest file of each kind, by the date in it.

    Raises:
        ValueError: a file has another kind of name.
    """
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name like 2026-11-30-h200-decode.json")
        dated = (read(path)["date"], path)
        found[match["kind"]] = max(dated, found.get(match["kind"], dated))
    return {kind: path for kind, (_, path) in sorted(found.items())}


def rows_at(content: dict[str, Any], batch: int, context: int) -> dict[str, Row]:
    """Rows that have a time, at one shape, by recipe."""
    shape = (batch, context)
    rows = [row for row in content["rows"] if "us" in row]
    return {row["format"]: row for row in rows if (row["batch"], row["context"]) == shape}


def costs() -> dict[str, float]:
    """KL of every setting as a multiple of that of an FP8 cache with one scale a tensor.

    Recipes are found under their own names too.
    """
    kl = {row["setting"]: row["kl"] for row in read(ACCURACY)["rows"]}
    relative = {name: value / kl["fp8_per_tensor"] for name, value in kl.items()}
    return relative | {recipe: relative[setting] for recipe, setting in _SETTINGS.items()}


def start_line(recipe: str) -> tuple[str, str]:
    """What a server logged at its start in the newest GPU report that has one, and the GPU's name.

    Raises:
        ValueError: there is none.
    """
    reports = [json.loads(path.read_text()) for path in REPORTS.glob("*.json")]
    for report in sorted(reports, key=lambda content: content["date"], reverse=True):
        line = re.search(rf"inkling: KV cache recipe {recipe}, [^\"]*?MiB", json.dumps(report))
        if line is not None:
            return line[0], report["host"]["gpu"]
    raise ValueError(f"no start with {recipe} in any report of {REPORTS}")
