"""Times of launch settings of `decode_fast`, side by side: where the rows of its table come from.

A setting is KV tokens of a tile, warps, stages and programs an SM. Every one is compared with the
reference before it is timed; one that does not fit the GPU or is wrong says so and has no time.

    python -m integration.gpu.sweep --format mxfp8 --shape 64x8k --shape 1x1k 64,1,3,6 64,2,3,4
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch

from inkling_backend.bench import results
from inkling_backend.bench.cases import DECODE, RECIPE_NAMES, VERIFY, Heads, make_case
from inkling_backend.bench.data import Lab
from inkling_backend.bench.ops import prepare
from inkling_backend.bench.results import Results, Row
from inkling_backend.bench.run import Bench
from inkling_backend.bench.timing import GraphMeter
from inkling_backend.formats import get_recipe
from inkling_backend.kernels import configs, decode_fast

Setting = tuple[int, ...]
# Small and large ones launch other specializations.
BATCHES = (4, 16)


def parse_setting(text: str) -> Setting:
    """``64,2,3,6``."""
    numbers = tuple(int(part) for part in text.split(","))
    if len(numbers) != 4 or min(numbers) < 1:
        raise ValueError(f"{text!r}: expected TOKENS,WARPS,STAGES,PROGRAMS")
    return numbers


@contextmanager
def using(setting: Setting) -> Iterator[None]:
    """Every `decode_fast` is launched with a setting, whatever the model."""

    def choose(*model: object) -> configs.KernelConfig | None:
        found = configs.fast_decode_config(*model)  # type: ignore[arg-type]
        if found is None:
            return None
        return configs.KernelConfig(found.block_m, *setting)

    with mock.patch.object(decode_fast, "fast_decode_config", choose):
        yield


def build(recipe: str, op: str, heads: Heads, new_tokens: int, setting: Setting) -> None:
    """Compile what a setting needs, into the cache on disk. What fails, fails again later."""
    with suppress(Exception), using(setting):
        lab = Lab(heads, torch.device("cuda"))
        for batch in BATCHES:
            case = make_case(op, f"{batch}x700", heads, query_tokens=new_tokens)
            prepare(lab, get_recipe(recipe), case, rotate=False).launch(0)
        torch.cuda.synchronize()


def sweep(
    recipes: Sequence[str],
    settings: Sequence[Setting],
    shapes: Sequence[str],
    heads: Heads,
    new_tokens: int,
    file: Path | None,
) -> list[Row]:
    """Time every recipe with every setting at every shape; rows carry their ``setting``."""
    op = DECODE if new_tokens == 1 else VERIFY
    cases = [make_case(op, shape, heads, query_tokens=new_tokens) for shape in shapes]
    jobs = list(itertools.product(recipes, settings))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // 2), mp_context=spawn) as pool:
        for recipe, setting in jobs:
            pool.submit(build, recipe, op, heads, new_tokens, setting)
    found = Results(results.gpu() | results.versions(results.LIBRARIES), file)
    for recipe, setting in jobs:
        name = ",".join(map(str, setting))

        def emit(row: Row, name: str = name) -> None:
            found.add(row | {"setting": name})
            time = f"{row['us']:8.1f} us" if "us" in row else "  failed"
            print(
                f"{row['format']:12} {name:16} {row['batch']}x{row['context']}: {time}", flush=True
            )

        with using(setting):
            lab = Lab(heads, torch.device("cuda"))
            Bench(lab, GraphMeter(0), print, with_peers=False).run(
                list(cases), [get_recipe(recipe)], emit
            )
    return found.rows


def main() -> int:
    """Parse the command line and sweep; status 1 if nothing at all could be timed."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", type=parse_setting, nargs="+", metavar="SETTING")
    parser.add_argument("--format", action="append", choices=RECIPE_NAMES, dest="recipes")
    parser.add_argument("--shape", action="append", dest="shapes", help="BATCHxCONTEXT like 64x8k")
    parser.add_argument("--q-heads", type=int, default=Heads.q_heads)
    parser.add_argument("--kv-heads", type=int, default=Heads.kv_heads)
    parser.add_argument("--head-dim", type=int, default=Heads.head_dim)
    parser.add_argument("--query-tokens", type=int, default=1, help="of a request")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    args = parser.parse_args()
    heads = Heads(args.q_heads, args.kv_heads, args.head_dim)
    rows = sweep(
        args.recipes or ["mxfp8"],
        args.settings,
        args.shapes or ["64x8k"],
        heads,
        args.query_tokens,
        args.json,
    )
    return int(not any("us" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
