"""Pools and batches beyond 32 and 16 bits: every kernel finds what it would find near by."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec
from inkling_backend.formats import Query, get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache, SideLayout
from inkling_backend.kernels.gather import gather
from inkling_backend.kernels.store import store
from inkling_backend.reference.attention import attend
from tests.attention.world import PLAIN, World, make_world, slots_of
from tests.kernels.helpers import assert_same_bits
from tests.kernels.test_decode import kernel, run_decode  # noqa: F401
from tests.kernels.test_extend import run_extend

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the memory of a GPU")
LENS = [70, 33]


def far_world(world: World, pages: int) -> World:
    """The same tokens in the last pages of a pool of so many; memory between is not touched."""
    near, layout = world.cache, world.layout
    used = near.num_pages
    shift = (pages - used) * layout.page_size

    def moved(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        big = torch.empty(shape, dtype=data.dtype, device=data.device)
        big[-data.shape[0] :] = data
        return big

    def side(
        geometry: SideLayout, data: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if scale is not None:
            scale = moved(scale, layout.scale_shape(geometry, pages))
        return moved(data, layout.data_shape(geometry, pages)), scale

    k_data, k_scale = side(layout.k, near.k_data, near.k_scale)
    v_data, v_scale = side(layout.v, near.v_data, near.v_scale)
    cache = LayerCache(layout, k_data, v_data, k_scale, v_scale, near.k_global, near.v_global)
    table = world.slot_table.clone()
    for b in range(len(world.lens)):
        table[world.rows[b], : world.lens[b]] += shift
    return replace(world, cache=cache, slot_table=table)


def pages_beyond(layout: CacheLayout, of: str) -> int:
    """Pages whose K data, or K scales, take over 2**31 bytes."""
    row = layout.k.row_items if of == "data" else layout.k.blocks
    return 2**31 // (layout.page_size * layout.num_kv_heads * row) + 8


@pytest.mark.parametrize(
    ("k", "v", "heads", "k_dim", "v_dim", "of"),
    [
        ("mxfp8", "mxfp8", 1, 64, 64, "data"),
        ("mxfp8", "kvfp4", 8, 256, 16, "data"),
        pytest.param("nvfp4", "kvfp4", 8, 64, 64, "data", marks=needs_gpu),
        pytest.param("nvfp4", "kvfp4", 8, 64, 16, "scale", marks=needs_gpu),
    ],
)
def test_pools_beyond_32_bits(
    k: str, v: str, heads: int, k_dim: int, v_dim: int, of: str, device: torch.device
) -> None:
    shape = {"kv_heads": heads, "group": 1, "k_dim": k_dim, "v_dim": v_dim}
    world = make_world(LENS, device, k=k, v=v, **shape)
    far = far_world(world, pages_beyond(world.layout, of))
    buffer = far.cache.k_data if of == "data" else far.cache.k_scale
    assert buffer is not None
    assert buffer.numel() > 2**31
    query = world.queries(len(LENS))
    assert torch.equal(run_decode(far, query), run_decode(world, query))
    query = world.queries(sum(LENS))
    assert torch.equal(run_extend(far, query, LENS), run_extend(world, query, LENS))

    rows = [torch.randn(LENS[0], heads, dim, device=device) for dim in (k_dim, v_dim)]
    for each in (world, far):
        store(*rows, slots_of(each, 0), each.cache)
    for side in ("k", "v"):
        got, want = (gather(slots_of(each, 0), each.cache, side) for each in (far, world))
        assert_same_bits(got, want, side)


def test_more_requests_than_16_bits_count(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored in one launch, attended by decode and by extend; as many as the interpreter bears."""
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    batch = 70_000 if device.type == "cuda" else 40
    mxfp8 = get_format("mxfp8")
    page, heads, group, dim = 32, 1, 2, 64
    layout = CacheLayout(mxfp8, mxfp8, heads, dim, dim, page)
    slots = (batch + 1) * page

    def buffers(side: SideLayout) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = layout.data_shape(side, batch + 1), layout.scale_shape(side, batch + 1)
        data, scale = (torch.zeros(each, dtype=torch.uint8, device=device) for each in shapes)
        return data, scale.fill_(side.format.one_scale)

    (k_data, k_scale), (v_data, v_scale) = buffers(layout.k), buffers(layout.v)
    cache = LayerCache(layout, k_data, v_data, k_scale, v_scale)
    runner = AttentionRunner(
        AttentionSpec(group * heads, layout, torch.bfloat16, False),
        max_batch=batch,
        max_context=page,
        max_tokens=slots,
        device=device,
    )
    table = torch.arange(slots, dtype=torch.int32, device=device).view(batch + 1, page)
    rows = torch.randperm(batch).to(device) + 1
    lens = torch.randint(1, 4, (batch,)).to(device)
    k, v = (torch.randn(3 * batch, heads, dim, device=device).bfloat16() for _ in "kv")
    where = (table[1:, :3]).flatten().long()
    assert len(where) > 65_535 or device.type == "cpu"
    store(k, v, where, cache)

    q = torch.randn(batch, group * heads, dim, device=device).bfloat16()
    out = torch.full_like(q, torch.nan)
    plan = runner.plan_decode(table, rows, lens, batch)
    runner.run(plan, Query(q), cache, out, PLAIN)
    extended = torch.full_like(q, torch.nan)
    indptr = torch.arange(batch + 1, device=device)
    extend = runner.plan_extend(table, rows, lens, indptr, [1] * batch, lens.tolist())
    runner.run(extend, Query(q), cache, extended, PLAIN)
    some = torch.tensor([0, 1, batch - 1, *random.choices(range(batch), k=30)], device=device)
    want = torch.empty(len(some), group * heads, dim, device=device)
    pages = (table[rows[some], :1] // page).int()
    bounds = torch.arange(len(some) + 1)
    attend(Query(q[some]), cache, pages, lens[some], bounds, layer=PLAIN, out=want)
    for got in (out, extended):
        assert got.isfinite().all()
        assert (got[some].float() - want).abs().max() < 0.02
