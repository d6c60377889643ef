"""A program of the GPU run, with a time limit and a log."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration.launch import ROOT

TIMED_OUT = 124  # as timeout(1) has it


def run_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """(exit status, or `TIMED_OUT`; everything that it printed, which goes to ``log`` too)."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        status, output = TIMED_OUT, f"{output}\nstopped after {seconds:g} s"
    log.write_text(output)
    return status, output
