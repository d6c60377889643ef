"""The documents beside the code say what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import inkling_backend.kernels
from inkling_backend.engines.sglang.patches import PATCHES
from inkling_backend.formats import RECIPES, get_format, get_recipe
from inkling_backend.formats.layout import CacheLayout

ROOT = Path(__file__).parents[1]
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


def test_the_table_of_recipes_says_what_was_measured() -> None:
    table = rows((ROOT / "README.md").read_text(), "| recipe | bits |")
    assert {row[0].split("`")[1] for row in table} == set(RECIPES)
    results = ROOT / "integration"
    newest = sorted((results / "benchmarks" / "results").glob("*-decode.json"))[-1]
    speed = {
        row["format"]: row["peers"]["flashinfer_bf16"] / row["us"]
        for row in json.loads(newest.read_text())["rows"]
        if (row["batch"], row["context"]) == (64, 8192)
    }
    costs = json.loads((results / "accuracy" / "results" / "smollm2.json").read_text())["rows"]
    kl = {row["setting"]: row["kl"] for row in costs}
    kl["mxfp8-nvfp4"] = kl["k_mxfp8_v_nvfp4"]
    for name, bits, size, tokens, decode, cost, _ in table:
        recipe = get_recipe(name.split("`")[1])
        layout = CacheLayout(recipe.k, recipe.v, 8, 128, 128)
        assert int(size) == layout.bytes_per_token
        assert float(bits) == layout.bytes_per_token * 8 / (2 * 8 * 128)
        gain = get_format("bf16").row_bytes(128) * 2 * 8 / layout.bytes_per_token
        assert tokens.strip("*") == f"{gain:.2f}x"
        assert decode.strip("*") == f"{speed[recipe.name]:.2f}x"
        assert float(cost) == round(kl[recipe.name] / kl["fp8_per_tensor"], 2)
    assert f"{kl['mxfp8_q_bf16'] / kl['fp8_per_tensor']:.2f} with" in table[1][-1]
