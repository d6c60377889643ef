"""The documents beside the code say what the code does."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import inkling_backend.kernels
from inkling_backend.bench import extra
from inkling_backend.engines.sglang import metrics
from inkling_backend.engines.sglang.patches import PATCHES
from inkling_backend.formats import RECIPES, get_format, get_recipe
from inkling_backend.formats.layout import CacheLayout

ROOT = Path(__file__).parents[1]
PACKAGE = Path(inkling_backend.__file__).parent
README = (ROOT / "README.md").read_text()
PLUGIN = (PACKAGE / "engines" / "sglang" / "README.md").read_text()
KERNELS = (PACKAGE / "kernels" / "README.md").read_text()
COMMANDS = (PACKAGE / "cli" / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(PACKAGE.rglob("README.md"))]
PAGES += sorted((ROOT / "integration").rglob("*.md"))
# Said by the engine, not by us.
FOREIGN = {"invalid choice: 'inkling'"}
# Modules whose messages reach people through the server, and through the commands.
SERVER = (
    *("attention/fa4.py", "attention/flashinfer_extend.py", "attention/spec.py", "env.py"),
    *("formats/layout.py", "formats/spec.py"),
    *(f"engines/sglang/{name}.py" for name in ("backend", "check", "flags", "patches")),
    *(f"engines/sglang/{name}.py" for name in ("host_pool", "pool", "pools", "requirements")),
    "engines/sglang/inkling_model.py",
    "engines/sglang/layer_recipes.py",
    "engines/sglang/sink_tokens.py",
    "engines/sglang/speculation.py",
)
TOOLS = (
    *(f"accuracy/{name}.py" for name in ("needle", "settings", "simulate", "subject")),
    *(f"bench/{name}.py" for name in ("app", "cases", "engine", "gate", "results")),
    *("cli/model.py", "cli/plan.py", "formats/recipe.py"),
)


def rows(text: str, head: str) -> list[list[str]]:
    """Cells of the table whose head line begins so."""
    lines = text[text.index(head) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_ledger_is_complete() -> None:
    told = {row[0].strip("`").split(".")[-1] for row in rows(PLUGIN, "| target | why")}
    assert told == {patch.target.split(".")[-1] for patch in PATCHES}


def literal(node: ast.expr | None) -> str:
    """Text of a string in the source, with {} for its values; empty if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return ""


def messages(path: Path) -> Iterator[str]:
    """What a module may tell people: texts of its exceptions and of its reasons."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            yield from filter(None, map(literal, node.value.elts))
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        first = literal(node.args[0])
        if called.endswith("UnknownNameError"):
            yield f"unknown {first}"
        elif called.endswith("EnvironmentVariableError"):
            yield f"environment variable {first}"
        elif called.endswith("UnsupportedError"):
            assert isinstance(node.args[1], ast.List | ast.Name), ast.unparse(node)
            yield from map(literal, getattr(node.args[1], "elts", ()))
        elif called.endswith("InvalidTensorError"):
            yield "expected ..., got ..."
        elif called in ("reasons.append", "note") or (
            re.search(r"(Error|BadParameter)$", called) and called != "NotImplementedError"
        ):
            yield first


def listed(text: str) -> set[str]:
    """Messages of the first column of a table of cures."""
    return {m for row in rows(text, "| message | cure") for m in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("text", "modules"), [(PLUGIN, SERVER), (COMMANDS, TOOLS)])
def test_every_message_has_its_cure(text: str, modules: tuple[str, ...]) -> None:
    known = {message.replace("inkling", "{}") for message in listed(text)} | listed(text)
    known |= {"expected ..., got ..."}
    said = {message for name in modules for message in messages(PACKAGE / name) if len(message) > 8}
    assert len(said) > 20
    assert {message for message in said if not any(part in message for part in known)} == set()


@pytest.mark.parametrize("text", [PLUGIN, COMMANDS])
def test_every_cured_message_exists(text: str) -> None:
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    # Messages are cut into lines in the source, and have values where the document has none.
    flat = re.sub(r'"\s*f?"', "", source).replace("{BACKEND}", "inkling")
    flat += "".join(
        f"unknown {kind}" for kind in re.findall(r'UnknownNameError\(\s*"([^"]+)"', flat)
    )
    flat += "environment variable INKLING_"
    flat += "".join(f"needs {name}" for name in extra.LIBRARIES) + "expected ..., got ..."
    found = listed(text) - FOREIGN
    assert len(found) > 10
    assert {message for message in found if message not in flat} == set()


def test_metrics_that_are_named_are_shown() -> None:
    named = set(re.findall(r"`(inkling:\w+)`", PLUGIN))
    assert named == {metrics.INFO, *metrics.GAUGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    for link in links:
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, link


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


def test_the_table_of_serving_features_is_true() -> None:
    """Its tests exist, and it refuses what the server refuses."""
    table = rows(README, "| feature | recipes | works")
    assert all(len(row) == 3 and all(row) for row in table)
    found = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "integration").glob("test_*.py")]
    tests = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in found)))
    refused: set[str] = set()
    for feature, recipes, status in table:
        flags = set(re.findall(r"`(--[\w-]+)", feature))
        assert set(re.findall(r"`(test_\w+)`", status)) <= tests
        assert set(re.findall(r"`([\w-]+)`", recipes)) <= set(RECIPES), recipes
        if recipes == "none":
            assert re.match(r"refused( with \w+, .+|: .+)", status), status
            refused |= flags
        else:
            assert re.match(r"(kernels only: )?`(test_\w+|integration/gpu/run)`", status), status
    text = (PACKAGE / "engines" / "sglang" / "requirements.py").read_text()
    server = text[text.index("_UNSUPPORTED:") : text.index("def uses_backend")]
    known = set(re.findall(r"\((--[\w-]+)\)", server)) | {"--cuda-graph-backend-prefill"}
    assert refused == known


def test_the_table_of_recipes_says_what_was_measured() -> None:
    table = rows(README, "| recipe | bits |")
    assert {row[0].split("`")[1] for row in table} == set(RECIPES)
    folder = ROOT / "integration"
    files = (folder / "benchmarks" / "results").glob("*-decode*.json")
    names = [path for path in files if re.search(r"-decode(-\d+)?\.json$", path.name)]
    contents = [json.loads(path.read_text()) for path in names]
    newest = max(contents, key=lambda content: content["date"])
    bf16 = ("flashinfer_bf16", "fa3_bf16", "torch_bf16")
    speed = {
        row["format"]: min(row["peers"][name] for name in bf16 if name in row["peers"]) / row["us"]
        for row in newest["rows"]
        if (row["batch"], row["context"]) == (64, 8192)
    }
    costs = json.loads((folder / "accuracy" / "results" / "smollm2.json").read_text())["rows"]
    kl = {row["setting"]: row["kl"] for row in costs}
    kl |= {"mxfp8-nvfp4": kl["k_mxfp8_v_nvfp4"], "mxfp8": kl["mxfp8_q_bf16"], "q": kl["mxfp8"]}
    kl |= {"mxfp4": kl["mxfp4_block32"]}
    for name, bits, size, tokens, decode, cost, choice in table:
        recipe = get_recipe(name.split("`")[1])
        layout = CacheLayout(recipe.k, recipe.v, 8, 128, 128)
        assert int(size) == layout.bytes_per_token
        assert float(bits) == layout.bytes_per_token * 8 / (2 * 8 * 128)
        gain = get_format("bf16").row_bytes(128) * 2 * 8 / layout.bytes_per_token
        assert tokens == f"{gain:.2f}x"
        assert decode == (f"{speed[recipe.name]:.2f}x" if recipe.name in speed else "-")
        assert float(cost) == round(kl[recipe.name] / kl["fp8_per_tensor"], 2)
        if recipe.name == "mxfp8":
            assert f"{kl['q'] / kl['fp8_per_tensor']:.2f} with" in choice
