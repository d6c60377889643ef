"""Random models, caches, batches and faults through every kernel, for a number of seconds.

The properties are those of ``tests/fuzz``; here a seed is their source, and many cases share a
compiled model. Exit status 1 if one failed; its case is named, and ``--case`` repeats it alone.

    python -m integration.gpu.fuzz --seconds 60 --seed 7 --json fuzz.json
    python -m integration.gpu.fuzz --case decode/7/3/12
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inkling_backend.bench import results
from integration.gpu.report import Case, case

WORKERS = 10
# Cases of one kernel for one model: compiling it takes as long as some ten of them.
CASES_A_MODEL = 12
# Something that fails always need not be told a thousand times.
MOST_MISMATCHES = 20


@dataclass
class Outcome:
    """What became of one kernel's cases.

    Attributes:
        cases, requests, faults: how many; see ``tests.fuzz.draw.Tally``.
        mismatches: the name of each failed case, and what was wrong.
    """

    cases: int = 0
    requests: int = 0
    faults: int = 0
    mismatches: dict[str, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        """Take in what another worker found."""
        self.cases += other.cases
        self.requests += other.requests
        self.faults += other.faults
        self.mismatches |= other.mismatches


def run_case(kernel: str, seed: int, model: int, number: int) -> tuple[int, int]:
    """One case; gives its (requests, faults).

    Raises:
        AssertionError: a property does not hold.
    """
    import torch

    from tests.fuzz.draw import GPU, MIDDLE, draw_model
    from tests.fuzz.properties import PROPERTIES

    gpu = torch.cuda.is_available()
    limits = GPU if gpu else MIDDLE
    of_model = random.Random(f"{seed}/{model}")
    rng = random.Random(f"{kernel}/{seed}/{model}/{number}")
    torch.manual_seed(rng.randrange(2**31))
    device = torch.device("cuda" if gpu else "cpu")
    tally = PROPERTIES[kernel](rng, draw_model(of_model, limits), limits, device)
    return tally.requests, tally.faults


def _work(
    worker: int, workers: int, seed: int, seconds: float, kernels: tuple[str, ...]
) -> dict[str, Outcome]:
    """Every model whose turn it is, for so long."""
    import torch

    import tests.fuzz.properties  # noqa: F401 - importing is not counted

    deadline = time.monotonic() + seconds
    torch.set_num_threads(1)
    found = {kernel: Outcome() for kernel in kernels}
    for model in itertools.count(worker, workers):
        for kernel, number in itertools.product(kernels, range(CASES_A_MODEL)):
            if time.monotonic() > deadline:
                return found
            outcome = found[kernel]
            outcome.cases += 1
            try:
                requests, faults = run_case(kernel, seed, model, number)
            except Exception as error:
                name = f"{kernel}/{seed}/{model}/{number}"
                where = traceback.extract_tb(error.__traceback__)[-1]
                outcome.mismatches[name] = (
                    f"{type(error).__name__}: {str(error)[:400]} ({where.filename}:{where.lineno})"
                )
                lost = "CUDA error" in str(error)  # the process has no GPU any more
                if lost or len(outcome.mismatches) >= MOST_MISMATCHES:
                    return found
            else:
                outcome.requests += requests
                outcome.faults += faults
    raise AssertionError("unreachable")


def fuzz(
    seconds: float, seed: int, kernels: tuple[str, ...], workers: int = WORKERS
) -> dict[str, Outcome]:
    """Fuzz the kernels in several processes at once; what was found, by kernel."""
    total = {kernel: Outcome() for kernel in kernels}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = [pool.submit(_work, i, workers, seed, seconds, kernels) for i in range(workers)]
        for worker, future in enumerate(running):
            try:
                found = future.result()
            except BrokenProcessPool as error:
                total[kernels[0]].mismatches[f"worker {worker} of seed {seed}"] = str(error)
                continue
            for kernel, outcome in found.items():
                total[kernel].add(outcome)
    return total


def cases_of(found: dict[str, Outcome], seed: int) -> Iterator[Case]:
    """Cases of the GPU report."""
    for kernel, outcome in found.items():
        wrong = outcome.mismatches
        detail = (
            f"{outcome.cases} cases, {outcome.requests} requests, {outcome.faults} faults "
            f"injected, {len(wrong)} mismatches; seed {seed}"
        )
        detail += "".join(f"\n{name}: {what}" for name, what in list(wrong.items())[:5])
        yield case(f"fuzz {kernel}", "all", not wrong and outcome.cases > 0, detail)


def run_fuzz(seconds: float, seed: int) -> Iterator[Case]:
    """Cases of all kernels."""
    from tests.fuzz.properties import PROPERTIES

    yield from cases_of(fuzz(seconds, seed, tuple(PROPERTIES)), seed)


def runs_kernels() -> bool:
    """Whether Triton kernels can run here."""
    import torch

    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def main() -> int:
    """Parse the command line and fuzz."""
    from tests.fuzz.properties import PROPERTIES

    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu.fuzz", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", choices=PROPERTIES, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes")
    parser.add_argument("--json", type=Path, help="write what was found into this file")
    parser.add_argument("--case", help="repeat one case: KERNEL/SEED/MODEL/NUMBER")
    args = parser.parse_args()
    if not runs_kernels():
        parser.error("no GPU: set TRITON_INTERPRET=1 to interpret the kernels, which is slow")
    if args.case:
        kernel, *numbers = args.case.split("/")
        print(run_case(kernel, *map(int, numbers)))
        return 0
    found = fuzz(args.seconds, args.seed, tuple(args.kernel or PROPERTIES), args.workers)
    cases = list(cases_of(found, args.seed))
    for each in cases:
        print(f"{each.status} {each.name}: {each.detail}")
    if args.json:
        content = results.header({"seconds": str(args.seconds), "seed": str(args.seed)})
        content["kernels"] = {kernel: asdict(outcome) for kernel, outcome in found.items()}
        print(results.write_json(args.json, content))
    return int(any(each.status != "pass" for each in cases))


if __name__ == "__main__":
    sys.exit(main())
