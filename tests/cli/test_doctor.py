"""The doctor's findings, next steps and exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from inkling_backend.attention import flashinfer_extend
from inkling_backend.cli import doctor
from inkling_backend.cli.app import app
from inkling_backend.engines.sglang.visible import PLUGIN


class Point:
    name = PLUGIN


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine on which everything is there; tests take things away."""
    versions = {"sglang": "0.5.23", "triton": "3.8.0", "inkling-backend": "0.1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Point])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(doctor, "gpu", lambda: {"driver": "580.1"})
    monkeypatch.setattr(doctor, "_offer", lambda: doctor.Check("plugin works", True, True, "yes"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("INKLING_KERNELS", raising=False)
    monkeypatch.delenv("INKLING_EXTEND", raising=False)
    return versions


def run(*arguments: str, columns: int = 120) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def faults() -> dict[str, str]:
    """Name and next step of what is needed and missing."""
    status, output = run("--json")
    checks = json.loads(output)["checks"]
    bad = {c["name"]: c["next_step"] for c in checks if c["needed"] and not c["ok"]}
    assert status == int(bool(bad))
    return bad


@pytest.mark.parametrize("columns", [80, 120])
def test_all_is_well(
    columns: int, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_extend, "reasons_against", lambda *arguments: [])
    assert faults() == {}
    status, output = run(columns=columns)
    assert status == 0
    for words in ("decode_fast", "H200", "580.1", "FA3", "This machine can serve"):
        assert words in output
    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output


@pytest.mark.parametrize(
    ("driver", "cuda", "hip", "step"),
    [
        (None, "13.0", None, "NVIDIA GPU and its driver"),
        ("470.1", "13.0", None, "update the driver"),
        (None, None, None, "CUDA build of torch"),
        (None, None, "6.4", "one of NVIDIA"),
    ],
)
def test_no_gpu(
    driver: str | None,
    cuda: str | None,
    hip: str | None,
    step: str,
    machine: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    assert list(faults()) == ["GPU"]
    assert step in faults()["GPU"]
    status, output = run()
    assert status == 1
    assert "This machine cannot serve yet: GPU" in output
    assert "plain torch" in output


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert doctor._driver() is None


def test_no_compiler(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install gcc" in faults()["C compiler"]


def test_an_ampere_gpu(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert faults() == {}
    checks = {check["name"]: check for check in json.loads(run("--json")[1])["checks"]}
    assert not checks["decode_fast"]["ok"]
    assert "decode serves instead; 9.0" in checks["decode_fast"]["next_step"]
    assert (checks["prefill"]["ok"], checks["prefill"]["found"]) == (False, "the Triton kernel")
    assert "FA3 runs on Hopper" in checks["prefill"]["next_step"]


def test_an_old_gpu(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "8.0" in faults()["GPU"]


@pytest.mark.parametrize("version", ["0.5.16", "0.6.0", "1.0"])
def test_an_engine_out_of_range(version: str, machine: dict[str, str]) -> None:
    machine["sglang"] = version
    assert "0.5.17" in faults()["SGLang"]


def test_no_engine_and_no_triton(machine: dict[str, str]) -> None:
    del machine["sglang"], machine["triton"]
    assert list(faults()) == ["triton", "SGLang"]


def test_a_plugin_that_the_engine_does_not_see(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert list(faults()) == ["plugin visible"]


def test_a_plugin_that_is_not_allowed(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another, third")
    assert "unset SGLANG_PLUGINS" in faults()["plugin allowed"]
    monkeypatch.setenv("SGLANG_PLUGINS", "another, inkling")
    assert faults() == {}


@pytest.mark.parametrize("name", ["INKLING_KERNELS", "INKLING_EXTEND"])
def test_a_wrong_environment_variable(
    name: str, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "cuda")
    assert faults() == {name: "unset it"}


def test_plain_torch_goes_without_graphs(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "reference")
    assert faults() == {}
    assert "--disable-cuda-graph" in run()[1]


def stand_in(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is run in the place of the one that asks the engine."""
    (folder / "stand_in.py").write_text(program)
    monkeypatch.setattr(doctor, "_CHECK", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("program", "ok", "found"),
    [
        ("", True, "offers --attention-backend inkling"),
        ("import sys; sys.exit('the engine did not load the plugin')", False, "did not load"),
        ("import os; os._exit(9)", False, "status 9"),
        ("import nowhere_at_all", False, "No module named 'nowhere_at_all'"),
        ("import time; time.sleep(60)", False, "no answer"),
    ],
)
def test_the_engine_is_asked(
    program: str, ok: bool, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, program, monkeypatch)
    monkeypatch.setattr(doctor, "_SECONDS", 1 if "sleep" in program else 60)
    check = doctor._offer()
    assert (check.ok, check.needed, bool(check.next_step)) == (ok, True, not ok)
    assert found in check.found


def test_without_triton_it_still_tells() -> None:
    program = (
        "import sys; from importlib import metadata\n"
        "sys.modules['triton'] = None\n"
        "whole = metadata.version\n"
        "def version(name):\n"
        "    if name in ('triton', 'sglang'): raise metadata.PackageNotFoundError(name)\n"
        "    return whole(name)\n"
        "metadata.version = version\n"
        "sys.argv[1:] = ['doctor', '--json']\n"
        "from inkling_backend.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    steps = {c["name"]: c["next_step"] for c in json.loads(done.stdout)["checks"] if not c["ok"]}
    assert steps["triton"] == "pip install triton"
    assert "inkling-backend[sglang]" in steps["SGLang"]
