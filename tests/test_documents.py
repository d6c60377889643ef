"""The documents beside the code say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import inkling_backend.kernels
from inkling_backend.engines.sglang.patches import PATCHES

PACKAGE = Path(inkling_backend.__file__).parent
PLUGIN = (PACKAGE / "engines" / "sglang" / "README.md").read_text()
KERNELS = (PACKAGE / "kernels" / "README.md").read_text()
# Said by the engine, not by us.
FOREIGN = {"invalid choice: 'inkling'"}


def rows(text: str, head: str) -> list[list[str]]:
    """Cells of the table whose head line begins so."""
    lines = text[text.index(head) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_ledger_is_complete() -> None:
    told = {row[0].strip("`").split(".")[-1] for row in rows(PLUGIN, "| target | why")}
    assert told == {patch.target.split(".")[-1] for patch in PATCHES}


def test_every_message_exists() -> None:
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    # Messages are cut into lines in the source, and have values where the document has none.
    flat = re.sub(r'"\s*f?"', "", source).replace("{BACKEND}", "inkling")
    messages = {row[0].split("`")[1] for row in rows(PLUGIN, "| message | cure")} - FOREIGN
    assert len(messages) > 10
    assert {message for message in messages if message not in flat} == set()


def test_every_kernel_is_listed() -> None:
    listed = {row[0].strip("`") for row in rows(KERNELS, "| module | what")}
    launched = {
        path.stem
        for path in (PACKAGE / "kernels").glob("*.py")
        if re.search(r"^\s+_?\w+kernel\[", path.read_text(), re.M)
    }
    assert listed == launched


@pytest.mark.parametrize("text", [PLUGIN, KERNELS], ids=["plugin", "kernels"])
def test_modules_that_are_named_exist(text: str) -> None:
    names = set(re.findall(r"`?((?:formats|kernels|engines)/[\w/]+\.py)`?", text))
    assert {name for name in names if not (PACKAGE / name).exists()} == set()
