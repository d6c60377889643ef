"""The JSON report of a GPU run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

SCHEMA = 1


@dataclass(frozen=True)
class Case:
    """One thing that was checked.

    Attributes:
        name: what was checked.
        recipe: cache recipe, or "all" where the check covers every recipe.
        status: "pass" or "fail".
        detail: the evidence, in one line or a few.
    """

    name: str
    recipe: str
    status: str
    detail: str


def case(name: str, recipe: str, passed: bool, detail: str) -> Case:
    """A case from a verdict."""
    return Case(name, recipe, "pass" if passed else "fail", detail)


def host() -> dict[str, str]:
    """GPU, driver and versions of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    gpu, driver = (part.strip() for part in first.split(","))
    versions = {name: metadata.version(name) for name in ("torch", "triton", "sglang")}
    return {"gpu": gpu, "driver": driver, **versions}


def commit(root: Path) -> str:
    """The commit under test: $COMMIT, else what git says, else "unknown"."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def write(out: Path, root: Path, cases: list[Case]) -> Path:
    """Write the report whole or not at all; returns its path, ``<date>-<gpu>.json``."""
    facts = host()
    now = datetime.now(UTC)
    content = {
        "schema": SCHEMA,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(root),
        "host": facts,
        "cases": [asdict(each) for each in cases],
    }
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{now.date()}-{gpu}.json"
    with tempfile.NamedTemporaryFile("w", dir=out, suffix=".tmp", delete=False) as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    Path(file.name).chmod(0o644)
    Path(file.name).replace(target)
    return target
