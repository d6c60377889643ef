"""Every figure of the documents: one file of results for each kind, named as it is kept.

    python -m integration.gpu.measure                      # all of them
    python -m integration.gpu.measure decode verify --out DIR
    python -m integration.gpu.measure --list

Each kind is one `inkling-backend bench`, which compares with the reference before it times; its
output goes on as it comes. Commit what is in the folder, then `make pages`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from inkling_backend.bench import results
from integration.launch import ROOT
from integration.pages.results import RESULTS

_SHORT = ("--shape", "1x1k", "--shape", "1x8k", "--shape", "8x2k")
_LARGE = ("--shape", "64x8k")
_THREE = ("--format", "mxfp8", "--format", "nvfp4", "--format", "mxfp8-nvfp4")
# Kind -> command of `inkling-backend bench` and its options. The first is the shapes of the tables,
# those with a suffix are other models, batches and costs.
KINDS: dict[str, tuple[str, ...]] = {
    "decode": ("decode",),
    "decode-store": ("decode", "--store", *_SHORT),
    "decode-ragged": ("decode", "--ragged", *_LARGE, *_THREE, "--no-peers"),
    "decode-gqa8": ("decode", *_LARGE, *_THREE, "--q-heads", "64"),
    "decode-gqa7": ("decode", *_LARGE, *_THREE, "--q-heads", "28", "--kv-heads", "4"),
    "decode-gqa16": ("decode", *_LARGE, *_THREE, "--q-heads", "32", "--kv-heads", "2"),
    "decode-mha": ("decode", "--shape", "16x8k", *_THREE, "--q-heads", "32", "--kv-heads", "32"),
    "decode-d64": ("decode", *_LARGE, *_THREE, "--head-dim", "64"),
    "decode-d96": ("decode", *_LARGE, *_THREE, "--head-dim", "96", "--no-peers"),
    "decode-d256": ("decode", *_LARGE, *_THREE, "--head-dim", "256"),
    "decode-page64": ("decode", *_LARGE, *_THREE, "--page-size", "64"),
    "verify": ("verify",),
    "verify-eight": ("verify", "--query-tokens", "8", *_THREE),
    "extend": ("extend",),
    "extend-triton": ("extend", "--extend", "triton", "--shape", "1x8k", "--no-peers"),
    "store": ("store",),
    "engine": ("engine", "--format", "mxfp8", "--format", "nvfp4", "--format", "mxfp8-nvfp4"),
    "quick": ("--quick",),
}
# Commands that take ``--sustained``.
_KERNELS = ("decode", "verify", "extend", "store")


def command(kind: str, file: Path, sustained: float) -> list[str]:
    """The program that measures a kind into a file."""
    options = list(KINDS[kind])
    if options[0] in _KERNELS:
        options += ["--sustained", str(sustained)]
    return [sys.executable, "-m", "inkling_backend.bench", *options, "--json", str(file)]


def file_name(gpu: str, kind: str, taken: Iterable[str]) -> str:
    """``DATE-GPU-KIND.json``, with a number behind it if that is ``taken``."""
    date = datetime.now(UTC).date().isoformat()
    stem = f"{date}-{gpu.split()[-1].lower()}-{kind}"
    names = (f"{stem}{number}.json" for number in ("", *(f"-{i}" for i in range(2, 100))))
    return next(name for name in names if name not in set(taken))


def main() -> int:
    """Parse the command line and measure; status 1 if a kind was not measured in full."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="some of those of --list")
    parser.add_argument("--list", action="store_true", help="print every kind and its command")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--sustained", type=float, default=1.0, help="seconds back to back a row")
    args = parser.parse_args()
    unknown = sorted(set(args.kinds) - set(KINDS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if args.list:
        for kind, options in KINDS.items():
            print(f"{kind:14} inkling-backend bench {' '.join(options)}")
        return 0
    gpu, failed = results.gpu()["gpu"], []
    for kind in args.kinds or KINDS:
        taken = {path.name for folder in (args.out, RESULTS) for path in folder.glob("*.json")}
        file = args.out / file_name(gpu, kind, taken)
        start = time.monotonic()
        status = subprocess.run(command(kind, file, args.sustained), cwd=ROOT).returncode
        failed += [kind] if status else []
        print(f"{kind}: status {status} after {time.monotonic() - start:.0f} s, {file}", flush=True)
    if failed:
        print(f"not in full: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
