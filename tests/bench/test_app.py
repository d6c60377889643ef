"""The command line: exit statuses, files and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from inkling_backend.bench import app as module
from inkling_backend.bench import data, peers, timing
from inkling_backend.bench.app import app
from inkling_backend.bench.results import Row
from inkling_backend.cli.app import app as whole
from tests.bench.world import FakeMeter, make_row

MEASURING = ("decode", "verify", "extend", "store", "engine")
SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--page-size", "32")


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and everything printed."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def write(path: Path, *rows: Row) -> Path:
    path.write_text(json.dumps({"schema": 1, "host": {"gpu": "NVIDIA H200"}, "rows": rows}))
    return path


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands believe in a GPU and measure on the CPU."""
    cpu = torch.device("cpu")
    lab = data.Lab

    def make_lab(heads: Any, device: object, extend: Any) -> data.Lab:
        small = {"rotate_bytes": 1 << 16, "max_batch": 4, "max_context": 1024}
        return lab(heads, cpu, extend=extend, **small)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "gpu", lambda: {"gpu": "NVIDIA H200", "driver": "1"})
    monkeypatch.setattr(data, "Lab", make_lab)
    monkeypatch.setattr(timing, "GraphMeter", lambda seconds: FakeMeter())


def test_the_tour_measures_four_operations(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HEADS", module.Heads(4, 2, 32, 32))
    monkeypatch.setattr(peers, "PEERS", ())
    built: list[set[str]] = []
    monkeypatch.setattr(
        peers.Peers, "warm_up", lambda self, cases: built.append({case.op for case in cases})
    )
    small = {"decode": ("2x40",), "verify": ("2x40",), "extend": ("1x40",), "store": ("9",)}
    monkeypatch.setattr(module.shapes, "QUICK_SHAPES", small)
    path = tmp_path / "out.json"
    status, output = run("--quick", "--json", path)
    assert status == 0, output
    rows = json.loads(path.read_text())["rows"]
    assert [row["op"] for row in rows[::3]] == list(small)
    assert [row["format"] for row in rows[:3]] == list(module.shapes.QUICK_RECIPES)
    assert rows[3]["new_tokens"] == 4
    # What peers compile is begun for all operations at once.
    assert built[0] == set(small)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--json", "x.json"), "give a command, or --quick"),
        (("--quick", "decode"), "after the command decode"),
    ],
)
def test_options_without_a_command(arguments: tuple[str, ...], words: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert words in output


INTERRUPTED = """
import os, signal, sys, threading
from typing import Any
import torch
from inkling_backend.bench import app, data, timing
from tests.bench.world import FakeMeter

lab, rows = data.Lab, []
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
app.gpu = lambda: {"gpu": "NVIDIA H200", "driver": "1"}
app.table.line = lambda row: rows.append(row) or (
    os.kill(os.getpid(), signal.SIGINT) if len(rows) == 2 else ""
) or "row"
data.Lab = lambda heads, device, extend: lab(
    heads, torch.device("cpu"), rotate_bytes=1 << 16, max_batch=4, max_context=1024
)
timing.GraphMeter = lambda seconds: FakeMeter()
data.STORE_SLOTS = 256
app.app(sys.argv[1:])
"""


@pytest.mark.parametrize("with_file", [True, False])
def test_ctrl_c_keeps_what_is_done(with_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = ["store", "--shape", "9", "--shape", "11", "--no-peers", *SMALL]
    flags += ["--json", str(path)] if with_file else []
    command = [sys.executable, "-c", INTERRUPTED, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    count = 2 * len(module.shapes.RECIPE_NAMES)
    assert f"interrupted: 2 of {count} rows are done" in done.stdout
    assert done.stdout.count("store") >= 2
    if with_file:
        rows = json.loads(path.read_text())["rows"]
        assert [row["format"] for row in rows] == list(module.shapes.RECIPE_NAMES[:2])
        assert f"results in {path}" in done.stdout.replace("\n", "")


@pytest.mark.parametrize("command", MEASURING)
def test_without_a_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, output = run(command)
    assert status == 2
    (line,) = output.splitlines()
    assert line.startswith(f"inkling-backend bench {command}: no CUDA GPU")


@pytest.mark.parametrize("command", MEASURING[:-1])
def test_a_run_writes_its_rows(command: str, fake_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shape = {"decode": "2x40", "verify": "2x40", "extend": "1x40+20", "store": "9"}[command]
    flags = ("--format", "mxfp8", "--format", "bf16", "--shape", shape, "--no-peers")
    status, output = run(command, *flags, *SMALL, "--json", path)
    assert status == 0, output
    content = json.loads(path.read_text())
    assert [row["format"] for row in content["rows"]] == ["mxfp8", "bf16"]
    assert {row["op"] for row in content["rows"]} == {command}
    assert content["host"]["torch"] == torch.__version__.split("+")[0]
    assert "of copy" in output
    assert [row["query"] for row in content["rows"]] == ["bf16", "bf16"]
    status, output = run(command, *flags, *SMALL, "--query-dtype", "mxfp8", "--json", path)
    assert status == 0, output
    rows = json.loads(path.read_text())["rows"]
    assert [row["query"] for row in rows] == ["mxfp8", "bf16"]


def test_extend_says_what_attended(fake_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = ("--format", "mxfp8", "--shape", "1x40", "--no-peers", *SMALL, "--json", path)
    assert run("extend", *flags, "--extend", "triton")[0] == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["kernels"] == "plain torch (reference)"
    status, output = run("extend", *flags, "--extend", "flashinfer")
    assert status == 1
    assert "INKLING_EXTEND=flashinfer" in output
    assert json.loads(path.read_text())["rows"][0]["gate"] == "fail"
    assert run("extend", *flags, "--extend", "fa3")[0] == 2


def test_a_failed_row_ends_with_status_one(fake_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    # KV heads of 48 elements do not fit MXFP8's blocks of 32.
    flags = ("--format", "mxfp8", "--format", "nvfp4", "--shape", "1x40", "--no-peers")
    heads = (*SMALL[:4], "--head-dim", "48", *SMALL[6:])
    status, output = run("decode", *flags, *heads, "--json", path)
    assert status == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["gate"] for row in rows] == ["fail", "pass"]
    assert "48" in output
    assert "Traceback" not in output


def test_an_engine_needs_the_plugin(monkeypatch: pytest.MonkeyPatch, fake_gpu: None) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    status, output = run("engine", "--format", "nvfp4")
    assert status == 1
    assert "does not find the plugin" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode", "--shape", "64*8k"), "64*8k"),
        (("decode", "--format", "mxfp9"), "known: "),
        (("decode", "--shape", "1x1k+1k"), "prefix"),
        (("verify", "--shape", "1x2"), "at least 4"),
        (("engine", "--format", "nvfp4-mxfp8"), "recipe of the engine"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], words: str, fake_gpu: None) -> None:
    status, output = run(*arguments)
    assert status == 1
    assert words in output
    assert "Traceback" not in output


def test_compare(tmp_path: Path) -> None:
    old = write(tmp_path / "old.json", make_row(), make_row(batch=1))
    new = write(tmp_path / "new.json", make_row(us=330.0), make_row(batch=2))
    status, output = run("compare", old, new)
    assert status == 1
    assert "1.100" in output
    assert "only in old.json: decode mxfp8 1x8k" in output
    assert "only in new.json: decode mxfp8 2x8k" in output
    assert run("compare", old, new, "--tolerance", "11")[0] == 0
    assert run("compare", old, old)[0] == 0
    status, output = run("compare", old, tmp_path / "missing.json")
    assert status == 1
    assert "missing.json" in output


def test_plot_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "inkling_backend.bench.plot", raising=False)
    status, output = run("plot", write(tmp_path / "old.json", make_row()))
    assert status == 1
    assert "pip install 'inkling-backend[bench]'" in output


def test_the_whole_command_line_has_it() -> None:
    result = CliRunner().invoke(whole, ["bench", "--help"])
    assert result.exit_code == 0
    for command in (*MEASURING, "compare", "plot"):
        assert command in result.output


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "inkling_backend.bench", "compare", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tolerance" in done.stdout
