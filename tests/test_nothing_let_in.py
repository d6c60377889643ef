"""The package unpickles nothing, starts no shell and opens no connection of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import inkling_backend

PACKAGE = Path(inkling_backend.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Modules that read pickles or talk to others.
FORBIDDEN = {
    *("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"),
    *("socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp"),
    *("multiprocessing.connection", "xmlrpc", "pty", "webbrowser"),
}
# Calls by their last names; torch.load and numpy.load unpickle.
FORBIDDEN_CALLS = {
    *("os.system", "os.popen", "eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.hub.load", "torch.save", "np.load", "numpy.load"),
    *("torch.ops.load_library", "ctypes.CDLL", "ctypes.cdll.LoadLibrary"),
}


# What else writes a file: pictures, and the configuration of a model in a temporary folder.
WRITERS = {"figures.py", "bench/engine.py"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or an attribute of one; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def faults(source: str) -> Iterator[str]:
    """What a module lets in."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in FORBIDDEN or name.split(".")[0] in FORBIDDEN:
                yield f"imports {name}"
        if isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield f"calls {dotted(node.func)}"
            for keyword in node.keywords:
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle"):
                    constant = isinstance(keyword.value, ast.Constant)
                    if not constant or keyword.value.value is not False:  # type: ignore[attr-defined]
                        yield f"passes {keyword.arg}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_let_in(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from urllib import request",
        "from multiprocessing import connection",
        "def f():\n    import socket",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import torch\ntorch.load('x')",
        "load(name, trust_remote_code=remote)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(faults(source))


def test_what_ci_installs_is_pinned_with_hashes() -> None:
    folder = ROOT / "requirements"
    locked = re.findall(r"^[\w.-]+==\S+$", (folder / "lock.txt").read_text(), re.MULTILINE)
    entry = r"^([\w.-]+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$"
    hashed = dict(re.findall(entry, (folder / "hashes.txt").read_text(), re.MULTILINE))

    def names(pins: Iterable[str]) -> set[str]:
        return {re.sub(r"[-_.]+", "-", pin).lower() for pin in pins}

    assert len(locked) > 200
    assert names(locked) == names(hashed)
    wanted = '"--require-hashes --no-deps -r requirements/hashes.txt"'
    assert f"make test REQUIREMENTS={wanted}" in (ROOT / ".ci" / "run").read_text()


def test_files_are_written_whole() -> None:
    """Files of results go through `results.write_json`, which renames them into place."""
    writers = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (
            dotted(node.func) == "open"
            or (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("write_text", "write_bytes", "open", "savefig")
            )
        )
    }
    assert writers == WRITERS
