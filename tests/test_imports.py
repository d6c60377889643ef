"""Imports go one way, and importing the package is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "inkling_backend"

# What each part may import from the others. A part is a folder or a module at the top.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "figures": set(),
    "env": {"errors"},
    "formats": {"errors", "env"},
    "reference": {"errors", "env", "formats", "transforms"},
    "kernels": {"errors", "env", "formats"},
    "cache": {"errors", "env", "formats", "reference", "kernels"},
    "attention": {"errors", "env", "formats", "reference", "kernels", "cache"},
    "compat": {"errors", "env", "formats", "reference", "kernels"},
    "engines": {
        *("errors", "env", "formats", "reference", "kernels", "cache", "attention"),
        "transforms",
    },
    "__init__": {"errors", "formats", "compat"},
    "bench": {
        *("errors", "env", "formats", "reference", "kernels", "cache", "attention"),
        *("compat", "engines", "figures"),
    },
    "transforms": {"errors", "formats"},
    "accuracy": {"errors", "formats", "transforms", "figures"},
    "cli": {
        *("errors", "env", "formats", "kernels", "cache", "attention", "engines", "bench"),
        "accuracy",
    },
    "__main__": {"cli"},
}
ENGINES = {"sglang", "vllm", "sgl_kernel"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names that a file imports, at the top or inside a function."""
    package = ("inkling_backend", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            if module == "inkling_backend":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    parts = {
        name.split(".")[1] for name in imports(path) if name.startswith("inkling_backend.")
    } - {part}
    assert parts <= ALLOWED[part]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_engines_import_an_engine(path: Path) -> None:
    named = {name.split(".")[0] for name in imports(path)} & ENGINES
    assert not named or part_of(path) == "engines"


def test_the_checks_see_every_form_of_import(tmp_path: Path) -> None:
    source = PACKAGE / "formats" / "layout.py"
    assert "inkling_backend.formats.spec" in set(imports(source))
    forms = "import sglang.srt\nfrom .. import kernels\nfrom inkling_backend import bench\n"
    tree = tmp_path / "example.py"
    tree.write_text(forms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PACKAGE", tmp_path.parent)
        found = set(imports(tree))
    assert found == {"sglang.srt", "inkling_backend.kernels", "inkling_backend.bench"}


def test_importing_the_package_is_light() -> None:
    program = """
import sys
import torch
before = set(sys.modules)
import inkling_backend
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded & {"triton", "sglang", "sgl_kernel", "flashinfer"}))
print(torch.cuda.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["", "False"]


def test_the_package_does_not_import_triton_by_itself() -> None:
    """torch may load Triton on its own; the modules behind the public names must not."""
    for path in MODULES:
        if part_of(path) in {
            "errors",
            "env",
            "formats",
            "reference",
            "__init__",
            "compat",
            "transforms",
        }:
            tree = ast.parse(path.read_text())
            top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            names = {alias.name for node in top for alias in node.names}
            names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
            assert not [name for name in names if name.split(".")[0] == "triton"], path


def exists(name: str) -> bool:
    """Whether the README's name is a path here, in the package, or a file of the package."""
    return (ROOT / name).exists() or any(PACKAGE.glob(f"**/{name.rstrip('/')}"))


def test_files_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml|txt|py|sh))`", text))
    named |= set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert named
    assert not sorted(name for name in named if not exists(name))


def test_make_targets_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", text))
    assert {"demo", "test"} <= named <= targets
