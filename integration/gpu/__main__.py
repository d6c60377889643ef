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
from integration.gpu.drafts import run_drafts
from integration.gpu.engines import run_engines
from integration.gpu.fuzz import run_fuzz
from integration.gpu.inkling import run_inkling
from integration.gpu.parallel import run_parallel
from integration.gpu.report import Case
from integration.gpu.sanitizer import run_sanitizer
from integration.gpu.soaks import run_soaks
from integration.gpu.suite import run_suite
from integration.launch import ROOT
from integration.model import DEFAULT_OUT, prepare

REPORTS = ROOT / "integration" / "reports"
FAULTS = {"fuzz", "soak", "sanitizer"}
# Parts with a report of their own, run when they are asked for.
APART = FAULTS | {"inkling"}
PARTS = ("suite", "engine", "drafts", *sorted(APART))
SECONDS = 60.0


def _some_parts(value: str) -> set[str]:
    names = set(value.split(","))
    if not names <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{value!r}: some of {', '.join(PARTS)}")
    return names


def _chosen(args: argparse.Namespace) -> set[str]:
    """The parts that the options ask for, without ``--only``."""
    if args.parallel:
        return {"parallel"}
    asked = {
        "suite": not args.skip_suite,
        "engine": not args.skip_engine,
        "drafts": not args.skip_engine,
        "fuzz": args.fuzz,
        "soak": args.soak,
        "sanitizer": args.sanitizer,
    }
    return {part for part, wanted in asked.items() if wanted}


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
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="fuzz every kernel, too")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="soak the servers, too")
    parser.add_argument("--sanitizer", action="store_true", help="run compute-sanitizer, too")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzing")
    parser.add_argument(
        "--only",
        type=_some_parts,
        metavar=",".join(PARTS),
        help=f"run these alone; fuzz and soak take {SECONDS:.0f} s unless told otherwise",
    )
    args = parser.parse_args()
    chosen = args.only or _chosen(args)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="gpu-run-"))
    logs.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    print(f"{report.host()}, logs in {logs}", flush=True)
    parts: list[Iterator[Case]] = []
    engines: Iterator[Case] = iter(())
    if chosen & {"engine", "drafts"}:
        model = prepare(args.model, args.gguf)
        print(f"[{time.monotonic() - start:4.0f} s] model in {model}", flush=True)
    if "engine" in chosen:
        engines = run_engines(model, logs)  # starts them, beside the suite
    if "suite" in chosen:
        parts.append(run_suite(logs))
    parts.append(engines)
    if "drafts" in chosen:
        parts.append(run_drafts(model, logs))
    if "inkling" in chosen:
        parts.append(run_inkling(logs))
    if "parallel" in chosen:
        parts.append(run_parallel(logs))
    if "fuzz" in chosen:
        parts.append(run_fuzz(args.fuzz or SECONDS, args.seed))
    if "soak" in chosen:
        parts.append(run_soaks(args.soak or SECONDS, logs))
    if "sanitizer" in chosen:
        parts.append(run_sanitizer(logs))

    kind = "two-gpus" if args.parallel else "-".join(sorted(chosen)) if chosen <= APART else ""
    cases: list[Case] = []
    for each in chain(*parts):
        cases.append(each)
        print(
            f"[{time.monotonic() - start:4.0f} s] {each.status} {each.recipe:5} {each.name}: "
            f"{each.detail}",
            flush=True,
        )
        # After every case: a stopped run leaves a report.
        path = report.write(args.out, ROOT, cases, kind)
    failed = [each for each in cases if each.status != "pass"]
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    if cases:
        print(path)
    return int(bool(failed) or not cases)


if __name__ == "__main__":
    sys.exit(main())
