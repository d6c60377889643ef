"""Run everything, print progress, write the report; exit status 1 if a case failed."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from integration.gpu import report
from integration.gpu.engines import run_engines
from integration.gpu.parallel import run_parallel
from integration.gpu.report import Case
from integration.gpu.suite import run_suite
from integration.launch import ROOT
from integration.model import DEFAULT_OUT, prepare

REPORTS = ROOT / "integration" / "reports"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="integration/gpu/run", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(os.environ.get("MODEL", DEFAULT_OUT)),
        help="directory of SmolLM2-135M-Instruct; made there if it is missing (default: $MODEL)",
    )
    parser.add_argument(
        "--gguf", type=Path, nargs="+", default=[], help="make the model from this file, or pieces"
    )
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--logs", type=Path, help="keep the logs in this folder")
    parser.add_argument("--skip-suite", action="store_true", help="leave out the unit tests")
    parser.add_argument("--skip-engine", action="store_true", help="leave out the engine")
    parser.add_argument("--parallel", action="store_true", help="run on two GPUs, nothing else")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="gpu-run-"))
    logs.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    print(f"{report.host()}, logs in {logs}", flush=True)
    parts: list[Iterator[Case]] = []
    if args.parallel:
        parts.append(run_parallel(logs))
        args.skip_engine = args.skip_suite = True
    if not args.skip_engine:
        model = prepare(args.model, args.gguf)
        print(f"[{time.monotonic() - start:4.0f} s] model in {model}", flush=True)
        parts.append(run_engines(model, logs))
    if not args.skip_suite:
        parts.append(run_suite(ROOT, logs))

    cases: list[Case] = []
    for each in chain(*reversed(parts)):
        cases.append(each)
        print(
            f"[{time.monotonic() - start:4.0f} s] {each.status} {each.recipe:5} {each.name}: "
            f"{each.detail}",
            flush=True,
        )
        # After every case: a stopped run leaves a report.
        path = report.write(args.out, ROOT, cases, "two-gpus" if args.parallel else "")
    failed = [each for each in cases if each.status != "pass"]
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    if cases:
        print(path)
    return int(bool(failed) or not cases)


if __name__ == "__main__":
    sys.exit(main())
