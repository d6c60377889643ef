"""The unit and kernel tests on the GPU: every file a pytest process, several at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from integration.gpu.logged import run_logged
from integration.gpu.report import Case, case
from integration.launch import ROOT

WORKERS = 6
FILE_SECONDS = 300
# test_package.py builds the package, for which a GPU host may lack a package index; test_compile.py
# compiles for other GPUs, which needs none and takes minutes.
LEFT_OUT = ("test_package.py", "test_compile.py")


def run_suite(logs: Path) -> Iterator[Case]:
    """One case for each test file, as they finish."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [
            pool.submit(_run_file, path, logs) for path in files if path.name not in LEFT_OUT
        ]
        for done in as_completed(running):
            yield done.result()


def _run_file(path: Path, logs: Path) -> Case:
    name = str(path.relative_to(ROOT))
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", name]
    start = time.monotonic()
    log = logs / (name.replace("/", "-") + ".log")
    status, output = run_logged(command, log, env, FILE_SECONDS)
    lines = [line for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    closing = lines[-1] if lines else "no output"
    detail = "\n".join([closing, *failed[:10]])
    return case(name, "all", status == 0, f"{detail} [{time.monotonic() - start:.0f} s]")
