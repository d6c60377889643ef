"""What the GPU run makes of its tools' output, without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from inkling_backend.bench.app import app
from inkling_backend.bench.cases import Heads
from inkling_backend.bench.look import NO_GPU
from inkling_backend.formats import get_recipe
from inkling_backend.kernels.decode_fast import config_for
from integration.engine import EngineFailed
from integration.gpu import fuzz, measure, sanitizer, sweep
from integration.gpu import watch as watching
from integration.gpu.__main__ import PARTS, _chosen, _some_parts
from integration.gpu.fuzz import Outcome, cases_of
from integration.gpu.watch import Watched, watch
from integration.pages.results import newest

MEMCHECK = "========= COMPUTE-SANITIZER\n36 kernel calls\n========= ERROR SUMMARY: {} errors"
RACECHECK = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 1 warning)"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (MEMCHECK.format(0), 0),
        (MEMCHECK.format(12), 12),
        ("========= ERROR SUMMARY: 1 error", 1),
        (RACECHECK.format(0, 0), 0),
        (RACECHECK.format(3, 2), 3),
        ("========= Error: Device not supported", None),
        ("", None),
    ],
)
def test_findings_of_a_tool(output: str, found: int | None) -> None:
    assert sanitizer.findings(output) == found


def test_a_missing_tool_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    (each,) = sanitizer.run_sanitizer(tmp_path)
    assert each.status == "fail"
    assert "not installed" in each.detail


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (MEMCHECK.format(0), "pass"),
        (MEMCHECK.format(2), "fail"),
        ("========= ERROR SUMMARY: 0 errors", "fail"),  # the program did not come to its end
        ("Device not supported", "fail"),
    ],
)
def test_a_tool_that_finds_something_or_does_not_run_fails(
    said: str, status: str, tmp_path: Path
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    tool.chmod(0o755)
    each = sanitizer._check("memcheck", "mxfp8", tool, tmp_path, {})
    assert each.status == status
    assert each.name == "sanitizer memcheck"


def test_figures_of_fuzzing() -> None:
    found = {"store": Outcome(3, 4, 5), "decode": Outcome(1, 1, 1, {"decode/7/0/2": "wrong"})}
    good, bad = cases_of(found, 7)
    assert (good.name, good.status) == ("fuzz store", "pass")
    assert "3 cases, 4 requests, 5 faults injected, 0 mismatches; seed 7" in good.detail
    assert (bad.name, bad.status) == ("fuzz decode", "fail")
    assert "decode/7/0/2: wrong" in bad.detail
    (nothing,) = cases_of({"plan": Outcome()}, 0)
    assert nothing.status == "fail"


def test_a_failed_property_is_told_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kernel: str, seed: int, model: int, number: int) -> tuple[int, int]:
        if (model, number) == (1, 3):
            raise AssertionError("off by one")
        return 2, 1

    monkeypatch.setattr(fuzz, "run_case", broken)
    found = fuzz._work(1, 2, 9, 0.2, ("store",))["store"]
    assert list(found.mismatches) == ["store/9/1/3"]
    assert "off by one" in found.mismatches["store/9/1/3"]
    assert found.requests == 2 * (found.cases - 1)


def test_parts_by_name() -> None:
    assert _some_parts("fuzz,soak") == {"fuzz", "soak"}
    with pytest.raises(argparse.ArgumentTypeError, match="some of suite, engine"):
        _some_parts("fuzz,everything")
    options = argparse.Namespace(
        parallel=False, skip_suite=False, skip_engine=True, fuzz=5.0, soak=None, sanitizer=True
    )
    assert _chosen(options) == {"suite", "fuzz", "sanitizer"}
    assert _chosen(options) <= set(PARTS)


def test_a_swept_setting_is_what_is_launched() -> None:
    layout = Heads().layout(get_recipe("mxfp8"))
    model = (layout, 4, 1, torch.bfloat16, (9, 0))
    usual = config_for(*model)
    with sweep.using(sweep.parse_setting("64,2,3,6")):
        config = config_for(*model)
        assert config is not None
        assert config.block_n == 64
        assert config.programs_per_sm == 6
        assert config.options == {"num_warps": 2, "num_stages": 3}
        assert config_for(layout, 64, 1, torch.bfloat16, (9, 0)) is None, "no such kernel"
    assert config_for(*model) == usual


@pytest.mark.parametrize("text", ["64,2,3", "64,2,3,6,128", "64,0,3,6", "64,2,x,6"])
def test_a_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected TOKENS|invalid literal"):
        sweep.parse_setting(text)


@pytest.mark.parametrize("kind", measure.KINDS)
def test_every_kind_is_a_command_that_gets_as_far_as_the_gpu(kind: str, tmp_path: Path) -> None:
    """And its file has a name that the documents' tables take."""
    if torch.cuda.is_available():
        pytest.skip("it would measure")
    file = tmp_path / measure.file_name("NVIDIA H200", kind, ())
    _python, _m, _bench, *options = measure.command(kind, file, 0.2)
    done = CliRunner().invoke(app, options)
    assert done.exit_code == NO_GPU, done.output
    file.write_text(json.dumps({"schema": 1, "date": "2026", "rows": []}))
    assert newest(tmp_path) == {kind: file}


def test_files_of_one_day_have_numbers() -> None:
    first = measure.file_name("NVIDIA H200", "decode", ())
    assert first.endswith("-h200-decode.json")
    second = measure.file_name("NVIDIA H200", "decode", [first])
    assert second == first.replace(".json", "-2.json")


class Engine:
    """What `watch` asks of an engine."""

    log = "\n".join(
        [
            " inkling: KV cache recipe mxfp8, 11880 bytes per token ",
            "Decode batch, #running-req: 1, cuda graph: True",
            "Decode batch, #running-req: 2, cuda graph: False",
        ]
    )

    def __init__(self, options: dict[str, object], env: object) -> None:
        self.options = options

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_an_engine_is_watched_to_its_end_or_to_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "RealEngine", Engine)
    good, bad, dead = Watched(), Watched(), Watched()
    asked: list[object] = []

    def fail(engine: object) -> None:
        raise ValueError("no such answer")

    def die(options: object, env: object) -> None:
        raise EngineFailed("it exited with status 9")

    watch(good, {"tp_size": 1}, lambda engine: asked.append(engine.options), 31000)  # type: ignore[attr-defined]
    assert asked == [{"tp_size": 1, "port": 31000, "nccl_port": 31100}]
    assert good.cache_lines == ["inkling: KV cache recipe mxfp8, 11880 bytes per token"]
    assert (good.decode_steps, good.graph_steps, good.error) == (2, 1, "")
    watch(bad, {}, fail, 31000)
    assert (bad.error, bad.log) == ("ValueError: no such answer", Engine.log)
    monkeypatch.setattr(watching, "RealEngine", die)
    watch(dead, {}, fail, 31000)
    assert (dead.error, dead.log) == ("it exited with status 9",) * 2
