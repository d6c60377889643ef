"""compute-sanitizer over every kernel: memcheck, racecheck and initcheck.

Kernels are compiled first by a run without a tool; then every recipe runs under every tool. Exit
status 1 if a tool found something or could not run.

    python -m integration.gpu.sanitizer --out logs
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inkling_backend.formats import RECIPES
from integration.gpu.logged import run_logged
from integration.gpu.report import Case, case
from integration.launch import has_gpu

TOOLS = ("memcheck", "racecheck", "initcheck")
WORKERS = 8
RUN_SECONDS = 240
ERROR_STATUS = 99
# Folders of CUDA toolkits, and of the wheels that bring parts of one.
_TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_WHEELS = ("nvidia/*/bin", "nvidia/*/compute-sanitizer", "nvidia/cuda_sanitizer_api/*")
_SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed.*|"
    r"ERROR SUMMARY: (\d+) hazard"
)


def find() -> Path | None:
    """The compute-sanitizer of PATH, of $CUDA_HOME, of a toolkit or of a wheel; None without."""
    packages = Path(sysconfig.get_paths()["purelib"])
    folders = [Path(os.environ["CUDA_HOME"], "bin")] if "CUDA_HOME" in os.environ else []
    folders += [Path(folder) for folder in _TOOLKITS]
    folders += [folder for pattern in _WHEELS for folder in sorted(packages.glob(pattern))]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    found = shutil.which("compute-sanitizer", path=path)
    return Path(found) if found else None


def findings(output: str) -> int | None:
    """Errors or hazards that a tool counted; None if it said nothing, so did not run."""
    summaries = _SUMMARY.findall(output)
    if not summaries:
        return None
    return sum(int(next(filter(None, groups))) for groups in summaries)


def _target(recipe: str) -> list[str]:
    return [sys.executable, "-m", "integration.gpu.sanitized", "--recipe", recipe]


def _check(tool: str, recipe: str, program: Path, logs: Path, env: dict[str, str]) -> Case:
    start = time.monotonic()
    # Without the caching allocator every tensor is an allocation with borders of its own.
    env = env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    flags = ["--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--print-limit", "20"]
    log = logs / f"sanitizer-{tool}-{recipe}.log"
    command = [str(program), *flags, *_target(recipe)]
    status, output = run_logged(command, log, env, RUN_SECONDS)
    found = findings(output)
    calls = re.search(r"(\d+) kernel calls", output)
    seconds = f"[{time.monotonic() - start:.0f} s]"
    if found is None or calls is None:
        lines = [line for line in output.splitlines() if line.strip()][-6:]
        detail = f"did not come to the end, status {status}: " + "\n".join(lines)
        return case(f"sanitizer {tool}", recipe, False, f"{detail} {seconds}")
    detail = f"{calls[1]} kernel calls, {found} mismatches {seconds}"
    if found:
        told = [line for line in output.splitlines() if line.startswith("=========")]
        detail += "\n" + "\n".join(told[1:12])
    return case(f"sanitizer {tool}", recipe, status == 0 and not found, detail)


def run_sanitizer(logs: Path, tools: tuple[str, ...] = TOOLS) -> Iterator[Case]:
    """A case for each tool and recipe, as they finish."""
    program = find()
    if program is None:
        yield case("sanitizer", "all", False, "compute-sanitizer is not installed")
        return
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["INKLING_EXTEND"] = "triton"  # our kernels are looked at, not FlashInfer's
    with ThreadPoolExecutor(WORKERS) as pool:
        compiled = dict(
            zip(
                RECIPES,
                pool.map(
                    lambda recipe: run_logged(
                        _target(recipe), logs / f"sanitized-{recipe}.log", env, RUN_SECONDS
                    ),
                    RECIPES,
                ),
                strict=True,
            )
        )
        for recipe, (status, output) in compiled.items():
            if status:
                yield case("sanitizer target", recipe, False, output[-1500:])
        running = [
            pool.submit(_check, tool, recipe, program, logs, env)
            for tool in tools
            for recipe, (status, _) in compiled.items()
            if status == 0
        ]
        for future in running:
            yield future.result()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu.sanitizer", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="keep the logs in this folder")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    args = parser.parse_args()
    if not has_gpu():
        parser.error("there is no CUDA GPU")
    logs = args.out or Path(tempfile.mkdtemp(prefix="sanitizer-"))
    logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for each in run_sanitizer(logs, tuple(args.tool or TOOLS)):
        print(f"{each.status} {each.recipe:11} {each.name}: {each.detail}", flush=True)
        failed += each.status != "pass"
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
