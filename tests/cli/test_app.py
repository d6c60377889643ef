"""The whole command line: help, version, and one look for every table."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from inkling_backend.bench import table
from inkling_backend.bench.compare import compare
from inkling_backend.cli.accuracy import results_table
from inkling_backend.cli.app import app
from tests.bench.world import make_row

BENCH = ("decode", "verify", "extend", "store", "engine", "compare", "plot")
COMMANDS = [("doctor",), ("plan",), ("accuracy",), ("bench",), *(("bench", name) for name in BENCH)]
LONGEST = "k_mxfp8_v_nvfp4+center+rotate+fouroversix+sinks"


def run(*arguments: str, columns: int = 80) -> tuple[int, str]:
    """Exit status and output."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(command: tuple[str, ...], columns: int) -> None:
    status, output = run(*command, "--help", columns=columns)
    assert status == 0
    assert f"Example: inkling-backend {' '.join(command)}" in output
    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output


def test_without_a_command_it_shows_them() -> None:
    _, output = run()
    assert all(name in output for name in ("doctor", "plan", "accuracy", "bench"))


def test_version() -> None:
    expected = f"inkling-backend {metadata.version('inkling-backend')}"
    assert run("--version") == (0, f"{expected}\n")


def accuracy_row(setting: str) -> dict[str, object]:
    numbers = {"kl": 0.0123456, "perplexity": 123.456789, "top1": 0.987654, "bits": 6.375}
    return {"setting": setting, **numbers, "needle": {"score": 0.5}, "attention_error": {"mean": 1}}


TABLES = {
    "results": table.results_table([make_row(format="mxfp8-nvfp4", op="verify", new_tokens=4)]),
    "engines": table.engine_table(
        [make_row(op="engine_decode", backend="inkling", ttft_ms=210.4, kv_tokens=12_345_678)]
    ),
    "comparison": table.comparison_table(
        compare({"rows": [make_row()]}, {"rows": [make_row(us=330.0)]}), 0.05
    ),
    "accuracy": results_table([accuracy_row(LONGEST)]),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_tables_lose_nothing(name: str, columns: int) -> None:
    def text(width: int) -> str:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(TABLES[name])
        return capture.get()

    assert isinstance(TABLES[name], Table)
    assert max(map(len, text(columns).splitlines())) <= columns
    # Whatever wraps is still there, letter by letter.
    narrow, wide = (sorted("".join(text(w).replace("─", "").split())) for w in (columns, 400))
    assert narrow == wide


def test_a_file_of_results_goes_through_every_command(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    content = {"schema": 1, "host": {"gpu": "NVIDIA H200"}, "date": "2026-01-02"}
    path.write_text(json.dumps({**content, "rows": [make_row()]}))
    assert run("bench", "compare", str(path), str(path))[0] == 0
    assert run("bench", "plot", str(path), "--out", str(tmp_path))[0] == 0
    assert (tmp_path / "decode-speedup.svg").exists()
