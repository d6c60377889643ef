"""The doctor's findings, next steps and exit status."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from inkling_backend.cli import doctor
from inkling_backend.cli.app import app


class Point:
    name = doctor.PLUGIN


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
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("INKLING_KERNELS", raising=False)
    monkeypatch.delenv("INKLING_EXTEND", raising=False)
    return versions


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def faults() -> dict[str, str]:
    """Name and next step of what is needed and missing."""
    status, output = run("--json")
    checks = json.loads(output)["checks"]
    bad = {c["name"]: c["next_step"] for c in checks if c["needed"] and not c["ok"]}
    assert status == int(bool(bad))
    return bad


def test_all_is_well(machine: dict[str, str]) -> None:
    assert faults() == {}
    status, output = run()
    assert status == 0
    assert "decode_fast" in output
    assert "NVIDIA H200" in output


def test_no_gpu(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(faults()) == ["GPU"]


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
    assert list(faults()) == ["plugin visible to the engine"]


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
