"""The command: tables, files, interruption and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inkling_backend.accuracy import measure as module
from inkling_backend.cli.app import app
from tests.accuracy import tiny

SMALL = ("--chunk", "32", "--chunks", "1", "--no-needles", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny-model"))


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(app, ["accuracy", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_a_run_writes_rows_and_pictures(model: Path, tmp_path: Path) -> None:
    file, pictures = tmp_path / "out.json", tmp_path / "pictures"
    chosen = ("--setting", "mxfp8", "--setting", "nvfp4+rotate")
    status, output = run("--model", model, *chosen, *SMALL, "--json", file, "--plot", pictures)
    assert status == 0, output
    rows = json.loads(file.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["mxfp8", "nvfp4+rotate"]
    assert {"model", "setting", "bits", "kl", "perplexity", "top1"} <= rows[0].keys()
    assert "needle" not in rows[0]
    assert sorted(path.name for path in pictures.iterdir()) == ["attention-error.svg", "kl.svg"]
    assert "nvfp4 +rotate" in output


def test_an_interrupted_run_keeps_what_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole = tmp_path / "out.json", module.measure

    def interrupted(*args: Any) -> Any:
        yield next(whole(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure", interrupted)
    status, output = run("--model", model, "--quick", "--no-needles", "--chunk", 32, "--json", file)
    assert status == 130
    assert [row["setting"] for row in json.loads(file.read_text())["rows"]] == ["fp8_per_tensor"]
    assert "attention" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--setting", "mxfp9"), "unknown setting 'mxfp9'; known: bf16"),
        (("--setting", "mxfp8+turn"), "unknown transform 'turn'"),
        (("--chunk", "99999999"), "longer --text"),
        (("--text", "/nowhere"), "/nowhere"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], words: str, model: Path) -> None:
    status, output = run("--model", model, *SMALL, *arguments)
    assert status == 1
    assert words in output.replace("\n", " ")
    assert "Traceback" not in output


def test_a_missing_library_names_its_extra() -> None:
    program = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "sys.argv[1:] = ['accuracy', '--model', '.']\n"
        "from inkling_backend.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "accuracy needs transformers: pip install 'inkling-backend[bench]'" in done.stderr
