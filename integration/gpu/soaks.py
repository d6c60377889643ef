"""Servers of every recipe under load at the same time, each soaked by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from integration.gpu.report import Case, case
from integration.launch import RECIPES, ROOT, stop

STREAMS = 64
# What a soak takes beside its load: starting, capturing graphs, answers given alone.
OTHER_SECONDS = 270
# Recipe, whether with the engine's deterministic inference, where tokens must be equal.
SETUPS = (*((recipe, False) for recipe in RECIPES), ("mxfp8", True), ("nvfp4", True))


def run_soaks(seconds: float, logs: Path) -> Iterator[Case]:
    """A case for each server, as far as they got."""
    with ThreadPoolExecutor(len(SETUPS)) as pool:
        running = [
            pool.submit(_soak, recipe, exact, seconds, index, logs)
            for index, (recipe, exact) in enumerate(SETUPS)
        ]
        for future in running:
            yield future.result()


def _soak(recipe: str, exact: bool, seconds: float, index: int, logs: Path) -> Case:
    kind = "soak deterministic" if exact else "soak"
    name = f"{kind.replace(' ', '-')}-{recipe}"
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "soak.json"
        command = [sys.executable, "-m", "integration.soak", "--seconds", str(seconds)]
        command += ["--recipe", recipe, "--streams", str(STREAMS), "--json", str(figures)]
        # Servers that start together must not look for free ports in the same range.
        command += ["--nccl-port", str(34000 + 200 * index), *(["--exact"] if exact else [])]
        command += ["--log", str(logs / f"{name}-server.log")]
        with (logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(seconds + OTHER_SECONDS)
            except subprocess.TimeoutExpired:
                stop(process)
                status = 124
        said = (logs / f"{name}.log").read_text()
        if not figures.is_file():
            return case(kind, recipe, False, f"ended with status {status}: {said[-1500:]}")
        seen = json.loads(figures.read_text())
    passed = status == 0 and not seen["mismatches"] and seen["faults"]["retracted"] > 0
    return case(kind, recipe, passed, seen["summary"])
