"""Prefill through FlashInfer's FA3 on a Hopper GPU: values, and bits that no chunking changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from inkling_backend.attention import LayerAttention, fa3, flashinfer_extend
from inkling_backend.attention.flashinfer_extend import reasons_against
from inkling_backend.formats import Query
from inkling_backend.kernels.arch import capability_of
from tests.attention.test_flashinfer_extend import (
    LAYERS,
    LENS,
    ROWS,
    TIGHT,
    check_all,
    check_poisoned,
    plan_of,
    poison,
    runner_of,
    spec,
)
from tests.attention.world import PLAIN, World, make_world


def _absent() -> str:
    """Why FA3 cannot run here, empty if it can."""
    if not torch.cuda.is_available():
        return "no GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    return "; ".join(reasons_against(spec(), 4096, capability_of(device)))


pytestmark = pytest.mark.skipif(bool(_absent()), reason=f"FlashInfer's FA3: {_absent()}")
RECIPES = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("nvfp4", "nvfp4"),
    ("kvfp4", "kvfp4"),
    ("mxfp4", "mxfp4"),
]
RECIPES += [("bf16", "bf16")]
DIMS = [(64, 64), (256, 256), (192, 128)]
# Several tiles of 128 tokens and some borders of theirs.
LONG, LONG_Q = [700, 50, 1201, 1, 290, 128, 257], [20, 0, 650, 1, 290, 3, 257]
LONG_ROWS = sum(LONG_Q)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles every kernel of these tests at the same time: each takes minutes."""
    kinds = [fa3.Kind(window, capped) for window, capped in product((None, 1), (False, True))]
    jobs = [((128, 128), kind) for kind in kinds]
    jobs += [(dims, kinds[0]) for dims in DIMS]
    buffer = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(fa3.make_wrapper, *dims, kind, buffer) for dims, kind in jobs]:
            future.result()


def long_world(device: torch.device, k: str, v: str, dims: tuple[int, int], **more: Any) -> World:
    return make_world(
        LONG, device, k=k, v=v, k_dim=dims[0], v_dim=dims[1], max_context=1280, **more
    )


def check_long(world: World, layers: tuple[LayerAttention, ...], scale: float = 1.0) -> None:
    """FA3's output of some layers against the reference."""
    quantized = world.layout.k_format.name == world.layout.v_format.name == "mxfp8"
    runner = runner_of(world, quantize_query=quantized)
    query = world.queries(LONG_ROWS, quantized=quantized, scale=scale)
    plan = plan_of(world, runner, LONG_Q)
    for layer in layers:
        out = runner.run(plan, query, world.cache, world.empty_out(LONG_ROWS), layer)
        check_all(world, out, query.dequantize(), layer, LONG_Q)


@pytest.mark.parametrize(("k", "v"), RECIPES)
def test_fa3_against_the_reference(k: str, v: str, device: torch.device) -> None:
    check_long(long_world(device, k, v, (128, 128)), (PLAIN,))


@pytest.mark.parametrize("layer", LAYERS[1:], ids=["window", "cap", "both"])
def test_fa3_windows_and_soft_caps(layer: LayerAttention, device: torch.device) -> None:
    check_long(long_world(device, "mxfp8", "nvfp4", (128, 128)), (layer,))


@pytest.mark.parametrize("dims", DIMS)
def test_fa3_other_head_dims(dims: tuple[int, int], device: torch.device) -> None:
    check_long(long_world(device, "mxfp8", "nvfp4", dims, group=7), (PLAIN,))


def test_fa3_in_rounds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_extend, "STAGING_BYTES", TIGHT)
    check_long(long_world(device, "mxfp8", "mxfp8", (128, 128)), (PLAIN, PLAIN))


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_fa3_hides_tokens_whatever_the_scale(scale: float, device: torch.device) -> None:
    world = long_world(device, "nvfp4", "nvfp4", (128, 128), k_scale=scale)
    check_long(world, (LayerAttention(0.1 / scale**2),), scale)


def test_fa3_keeps_what_is_not_finite_where_it_is(device: torch.device) -> None:
    world = make_world(LENS, device, k_dim=128)
    runner, query = runner_of(world), world.queries(ROWS)

    def run() -> torch.Tensor:
        plan = plan_of(world, runner)
        return runner.run(plan, query, world.cache, world.empty_out(ROWS), PLAIN)

    clean = run()
    poison(world, torch.nan)
    check_poisoned(run(), clean)


@pytest.mark.parametrize("layer", LAYERS[:2], ids=["full", "window"])
@pytest.mark.parametrize(("k", "v"), RECIPES)
def test_a_row_has_the_same_bits_in_every_chunk(
    k: str, v: str, layer: LayerAttention, device: torch.device
) -> None:
    """A prompt of 8k tokens at once, its last 2k over a prefix of 6k, and ragged chunks."""
    length = 8192
    if layer.window is not None:
        layer = replace(layer, window=1000)
    world = make_world(
        *([length, 700], device),
        **{"k": k, "v": v, "kv_heads": 8, "group": 4, "k_dim": 128, "page": 128},
        max_context=16384,
    )
    quantized = k == v == "mxfp8"
    runner = runner_of(world, quantize_query=quantized)
    query = world.queries(length, quantized=quantized)

    def rows(first: int, last: int, company: int = 0) -> torch.Tensor:
        """Rows of request 0 as one chunk, alone or beside some rows of request 1."""
        index = [*range(first, last), *range(company)]
        data, scale = (None if t is None else t[index].contiguous() for t in query)
        assert data is not None
        n = last - first
        indptr = torch.tensor([0, n, n + company], device=device)
        lens = torch.tensor([last, 700], device=device)
        plan = runner.plan_extend(
            world.slot_table, world.rows, lens, indptr, [n, company], [last, 700]
        )
        out = world.empty_out(n + company)
        return runner.run(plan, Query(data, scale), world.cache, out, layer)[:n]

    whole = rows(0, length)
    assert torch.equal(rows(6144, length), whole[6144:]), "prefix hit"
    assert torch.equal(rows(6144, length, company=300), whole[6144:]), "in a batch"
    for first, last in pairwise([0, 1, 130, 1000, 1001, 3333, 8000, 8191, 8192]):
        assert torch.equal(rows(first, last), whole[first:last]), f"chunk {first}:{last}"
