"""Layers whose pages lie in a second pool, which has given back what every window has passed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from inkling_backend.attention import (
    AttentionRunner,
    AttentionSpec,
    MixedRunner,
    triton_path,
)
from inkling_backend.cache import KVCachePool
from inkling_backend.env import Extend
from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.layout import LayerCache
from tests.attention.test_flashinfer_extend import Feed
from tests.attention.test_graphs import zeros
from tests.attention.test_runner import decoder_layer
from tests.attention.world import PLAIN, World, assert_as_accurate, make_world, slots_of

LENS = [300, 70, 1, 0]
Q_LENS = [65, 20, 1, 0]
WINDOW = 40


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in runs on the CPU")
pytestmark = pytest.mark.usefixtures("triton_extends")


@dataclass
class Second:
    """The second pool of a world.

    Attributes:
        cache: NaN wherever no token is.
        slot_map: of every slot of the world's cache, as the engine keeps it: an entry for slot -1
            at the end.
    """

    cache: LayerCache
    slot_map: torch.Tensor


def second_pool(world: World, oldest_seen: list[int], *, page_0_is_nan: bool = True) -> Second:
    """Tokens of each request from the page of ``oldest_seen`` on, in pages of another order."""
    page, pages = world.layout.page_size, world.cache.num_pages
    pool = KVCachePool(world.layout, 1, pages + 3, world.device)
    for buffer in pool.buffers():
        buffer.tensor.view(torch.uint8).fill_(0xFF)
    cache = pool.layer(0)
    for name in ("k_global", "v_global"):
        scale = getattr(world.cache, name)
        if scale is not None:
            getattr(cache, name).copy_(scale)
    slot_map = torch.zeros(pages * page + 1, dtype=torch.int64, device=world.device)
    slot_map[-1] = -1
    free = (torch.randperm(pages + 2) + 1).tolist()
    moved, first = KVCachePool(world.layout, 1, 0, world.device), world.cache
    if not page_0_is_nan:
        zeros(cache)
    for b, oldest in enumerate(oldest_seen):
        slots = slots_of(world, b)
        for start in range(max(0, oldest) // page * page, len(slots), page):
            here = slots[start : start + page]
            there = free.pop() * page + torch.arange(len(here), device=world.device)
            slot_map[here] = there
            to, where = (moved._indices(world.layout, slots) for slots in (there, here))
            for tensor, i, source, j in zip(
                moved._flat(cache), to, moved._flat(first), where, strict=True
            ):
                tensor[i] = source[j]
    return Second(cache, slot_map)


def two_pool_runner(world: World, extend: Extend | None = None) -> AttentionRunner:
    spec = AttentionSpec(world.num_q_heads, world.layout, world.dtype, quantize_query=False)
    return AttentionRunner(
        spec,
        max_batch=8,
        max_context=world.max_context,
        max_tokens=world.cache.num_pages * world.layout.page_size,
        maps_slots=True,
        extend=extend,
        device=world.device,
    )


def first_seen(q_lens: list[int]) -> list[int]:
    """First position that the first new token of each request sees."""
    return [length - n - WINDOW for length, n in zip(LENS, q_lens, strict=True)]


@pytest.mark.parametrize(("k", "v"), [("mxfp8", "nvfp4"), ("bf16", "bf16")])
@pytest.mark.parametrize("features", [False, True])
def test_both_pools_give_the_same_bits(
    implementation: str, k: str, v: str, features: bool, device: torch.device
) -> None:
    world = make_world(LENS, device, k=k, v=v)
    layer = decoder_layer(device) if features else replace(PLAIN, window=WINDOW)
    runner = two_pool_runner(world)

    second = second_pool(world, first_seen([1] * 4))
    plan = runner.plan_decode(
        world.slot_table, world.rows, world.seq_lens, 4, slot_map=second.slot_map
    )
    assert plan.mapped().page_table[0, :5].tolist() == [0, 0, 0, 0, second_page(world, second, 4)]
    query = world.queries(4)
    want = runner.run(plan, query, world.cache, world.empty_out(4), layer)
    got = runner.run(plan.mapped(), query, second.cache, world.empty_out(4), layer)
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)

    second = second_pool(world, first_seen(Q_LENS))
    extend = runner.plan_extend(
        *(world.slot_table, world.rows, world.seq_lens),
        torch.tensor([0, *Q_LENS], device=device).cumsum(0),
        *(Q_LENS, LENS),
        slot_map=second.slot_map,
    )
    pages = [second_page(world, second, i) for i in (3, 4)]
    assert extend.mapped().page_table[0, :5].tolist() == [0, 0, 0, *pages]
    assert extend.mapped().rounds == extend.rounds
    query = world.queries(86)
    want = runner.run(extend, query, world.cache, world.empty_out(86), layer)
    got = runner.run(extend.mapped(), query, second.cache, world.empty_out(86), layer)
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)


@on_cpu
def test_copies_of_pages_that_are_not_there(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA3 gets all tokens of a request; page 0, which stands for what is gone, is finite."""
    feed = Feed(monkeypatch)
    world = make_world(LENS, device, k="mxfp8", v="nvfp4")
    runner, layer = two_pool_runner(world, "flashinfer"), replace(PLAIN, window=WINDOW)
    second = second_pool(world, first_seen(Q_LENS), page_0_is_nan=False)
    plan = runner.plan_extend(
        *(world.slot_table, world.rows, world.seq_lens),
        torch.tensor([0, *Q_LENS], device=device).cumsum(0),
        *(Q_LENS, LENS),
        slot_map=second.slot_map,
    )
    query = world.queries(86)
    want = runner.run(plan, query, world.cache, world.empty_out(86), layer)
    monkeypatch.setattr(triton_path, "extend", with_no_marks)
    got = runner.run(plan.mapped(), query, second.cache, world.empty_out(86), layer)
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)
    assert [wrapper.runs for wrapper in feed.wrappers] == [2]


def with_no_marks(*_: object, marks: torch.Tensor, **__: object) -> None:
    assert not marks.any(), "nothing is to be computed again"


def second_page(world: World, second: Second, page: int) -> int:
    """Where a page of the first request lies in the second pool."""
    slot = slots_of(world, 0)[page * world.layout.page_size]
    return int(second.slot_map[slot]) // world.layout.page_size


def test_a_replay_reads_the_map_as_it_is_then(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU a replay is the same step once more, on the same buffers."""
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world(LENS, device, k="mxfp8")
    layer, runner = replace(PLAIN, window=WINDOW), two_pool_runner(world)
    second, query = second_pool(world, [0] * 4), world.queries(4)
    new, stored = torch.zeros(4, dtype=torch.int64, device=device), {}
    out = world.empty_out(4)

    def step() -> None:
        plan = runner.plan_decode(
            world.slot_table, world.rows, world.seq_lens, 4, slot_map=second.slot_map
        )
        stored["slots"] = second.slot_map[new]
        runner.run(plan.mapped(), query, second.cache, out, layer)

    step()
    want = out.clone()
    graph = None
    if device.type == "cuda":
        lens = world.seq_lens
        monkeypatch.setattr(World, "seq_lens", property(lambda self: lens))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    # All pages move; those before the window are given back.
    moved = second_pool(world, first_seen([1] * 4))
    second.slot_map.copy_(moved.slot_map)
    for name in ("k_data", "k_scale", "v_data", "v_scale"):
        getattr(second.cache, name).copy_(getattr(moved.cache, name))
    new.copy_(torch.tensor([int(slots_of(world, b)[-1]) for b in (0, 1, 2)] + [-1]))
    out.fill_(torch.nan)
    if graph is None:
        step()
    else:
        graph.replay()
    assert torch.equal(out, want)
    last = [int(moved.slot_map[slots_of(world, b)[-1]]) for b in (0, 1, 2)]
    assert stored["slots"].tolist() == [*last, -1]
    assert all(slot > 0 for slot in last)


def test_a_map_comes_with_two_pools_alone(implementation: str, device: torch.device) -> None:
    world = make_world([70], device)
    batch = (world.slot_table, world.rows, world.seq_lens)
    slot_map = torch.zeros(world.cache.num_pages * 64 + 1, dtype=torch.int64, device=device)
    one, two = world.runner(), two_pool_runner(world)
    indptr = torch.tensor([0, 1], device=device)
    for runner, wrong in (
        (one, slot_map),
        (two, None),
        (two, slot_map.float()),
        (two, slot_map[None]),
    ):
        with pytest.raises(InvalidTensorError, match=r"^slot_map:"):
            runner.plan_decode(*batch, 1, slot_map=wrong)
        with pytest.raises(InvalidTensorError, match=r"^slot_map:"):
            runner.plan_extend(*batch, indptr, [1], [70], slot_map=wrong)
    assert one.plan_decode(*batch, 1).mapped_table is None


def test_the_second_tables_are_counted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world([70], device)
    pages = -(-min(world.max_context, world.cache.num_pages * 64) // 64)
    tables = 2 * 8 * pages * 4
    both = two_pool_runner(world).workspace_bytes
    assert both - world.runner(max_batch=8).workspace_bytes == tables


def test_layers_with_a_window_may_have_kv_heads_of_their_own(
    implementation: str, device: torch.device
) -> None:
    """In the second pool; the work of a step is split otherwise for them."""
    first = make_world(LENS, device, k="mxfp8", kv_heads=2, group=2)
    second = make_world(LENS, device, k="mxfp8", kv_heads=4, group=1)
    slots = first.cache.num_pages * first.layout.page_size
    slot_map = torch.zeros(slots, dtype=torch.int64, device=device)
    for b in range(len(LENS)):
        slot_map[slots_of(first, b)] = slots_of(second, b)
    spec = AttentionSpec(4, first.layout, first.dtype, quantize_query=False)
    sizes: dict[str, Any] = {"max_batch": 8, "max_context": first.max_context, "device": device}
    mixed = MixedRunner(spec, [second.layout], maps_slots=True, max_tokens=slots, **sizes)
    alone = AttentionRunner(replace(spec, layout=second.layout), max_tokens=slots, **sizes)
    layer = replace(PLAIN, window=WINDOW)

    plan = mixed.plan_decode(
        first.slot_table, first.rows, first.seq_lens, len(LENS), slot_map=slot_map
    )
    assert len(plan.others or {}) == (implementation == "triton")
    query = first.queries(len(LENS))
    there = alone.plan_decode(second.slot_table, second.rows, second.seq_lens, len(LENS))
    want = alone.run(there, query, second.cache, second.empty_out(len(LENS)), layer)
    got = mixed.run(plan.mapped(), query, second.cache, second.empty_out(len(LENS)), layer)
    assert torch.equal(got, want)
    for b in range(len(LENS)):
        assert_as_accurate(got[b : b + 1], second, b, query.dequantize()[b : b + 1], layer)
    own = mixed.run(plan, query, first.cache, first.empty_out(len(LENS)), layer)
    assert_as_accurate(own[:1], first, 0, query.dequantize()[:1], layer)

    indptr = torch.tensor([0, *Q_LENS], device=device).cumsum(0)
    total = sum(Q_LENS)
    query = first.queries(total)
    lengths = (indptr, Q_LENS, LENS)
    plan = mixed.plan_extend(
        first.slot_table, first.rows, first.seq_lens, *lengths, slot_map=slot_map
    )
    there = alone.plan_extend(second.slot_table, second.rows, second.seq_lens, *lengths)
    want = alone.run(there, query, second.cache, second.empty_out(total), layer)
    got = mixed.run(plan.mapped(), query, second.cache, second.empty_out(total), layer)
    assert torch.equal(got, want)
