"""The JSON report of a GPU run."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from inkling_backend.bench import results


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
    return {**results.gpu(), **results.versions(("torch", "triton", "sglang"))}


def write(out: Path, root: Path, cases: list[Case], kind: str = "") -> Path:
    """Write the report whole or not at all; returns its path, ``<date>-<gpu>[-<kind>].json``."""
    content = results.header(host(), root)
    content["cases"] = [asdict(each) for each in cases]
    gpu = re.sub(r"[^a-z0-9]+", "-", content["host"]["gpu"].lower()).strip("-")
    name = "-".join(filter(None, (content["date"][:10], gpu, kind)))
    return results.write_json(out / f"{name}.json", content)
