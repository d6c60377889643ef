"""Files of results: whole or not there, with the facts of the host."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from inkling_backend.bench import results
from tests.bench.world import make_row

HOST = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def test_a_stopped_run_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    run = results.Results(HOST, path)
    assert not path.exists()
    run.add(make_row())
    run.add(make_row(batch=16))
    content = results.read(path)
    assert content["schema"] == 1
    assert content["host"] == HOST
    assert set(content) == {"schema", "date", "commit", "host", "rows"}
    assert content["rows"] == run.rows
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    results.write_json(path, {"good": 1})
    with pytest.raises(TypeError):
        results.write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"good": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "rows": []}', '{"schema": 1}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(results.ResultsError, match=r"other\.json"):
        results.read(path)


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc")
    assert results.commit(tmp_path) == "abc"
    monkeypatch.delenv("COMMIT")
    assert results.commit(tmp_path) == "unknown"
    (tmp_path / ".git").touch()

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert str(tmp_path) in command
        return subprocess.CompletedProcess(command, 0, "def\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert results.commit(tmp_path) == "def"


def test_facts_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "NVIDIA H200, 580.1\nNVIDIA H200, 580.1\n")

    def version(name: str) -> str:
        if name not in ("torch", "flash-attn-3"):
            raise metadata.PackageNotFoundError(name)
        return f"1 of {name}"

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(metadata, "version", version)
    assert results.gpu() == {"gpu": "NVIDIA H200", "driver": "580.1"}
    found = results.versions(results.LIBRARIES)
    assert found == {"torch": "1 of torch", "fa3": "1 of flash-attn-3"}


def test_rows_are_told_apart_by_what_they_measure_alone() -> None:
    row = make_row()
    assert results.identity(row) == results.identity(make_row(us=1.0, peers={}, gate="fail"))
    for key in ("op", "format", "batch", "context", "page_size", "ragged", "store", "new_tokens"):
        assert results.identity(row) != results.identity(make_row(**{key: 1})), key


def test_the_yardstick_is_the_best_bf16_peer() -> None:
    assert results.best_bf16_peer(make_row()) == 496.0
    assert results.best_bf16_peer(make_row(peers={"fa3_fp8": 1.0})) is None
    assert results.best_bf16_peer(make_row(peers=None)) is None
