"""Decode and merge against exact attention over the dequantized cache."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.kernels import merge as merging
from inkling_backend.kernels.configs import CHUNK_TOKENS, SplitRule
from inkling_backend.kernels.decode import DecodeCall, Partial, decode
from inkling_backend.kernels.decode_fast import config_for, decode_fast
from inkling_backend.kernels.decode_redo import decode_redo
from inkling_backend.kernels.merge import merge
from inkling_backend.reference.store import store
from tests.attention.world import (
    PLAIN,
    World,
    assert_as_accurate,
    attend_exactly,
    make_world,
    slots_of,
    strided,
)
from tests.kernels.test_plan import run_plan_decode

UNIT = LayerAttention(1.0)
RULE = SplitRule(64, 512, 4, 64, most_items=100)
# As `decode_fast` has it, with a program for every work item: chunks are those of small batches.
SPLITS = SplitRule(1024, 1024, 1, CHUNK_TOKENS, most_items=100, programs=1 << 20)
CHUNKED = SPLITS._replace(most_chunks=7)


def kernels() -> list[Callable[..., None]]:
    """The decode kernels that can run here."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return [decode, decode_fast] if capability >= (9, 0) else [decode]


@pytest.fixture(params=kernels(), ids=lambda kernel: kernel.__name__, autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with every decode kernel; with `decode` where the fast one does not fit."""
    monkeypatch.setattr(sys.modules[__name__], "chosen", request.param)


chosen: Callable[..., None] = decode


def run_decode(
    world: World,
    query: Query,
    *,
    order: list[int] | None = None,
    rule: SplitRule | None = None,
    layer: LayerAttention = PLAIN,
    q_len: int = 1,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plans and attends in buffers full of NaN; ``[B, Hq, Dv]`` in the order asked for.

    With more than one query token, those come before the heads and requests have their own order.
    """
    order = list(range(len(world.lens))) if order is None else order
    model = (world.layout, world.group, q_len, world.dtype)
    fast = chosen is decode_fast and config_for(*model, (9, 0))
    call = make_call(world, query, order, rule or (CHUNKED if fast else RULE), layer, q_len)
    call = call._replace(tree=tree)
    (decode_fast if fast else decode)(call)
    merge(call)
    assert call.partial.failures.item() == 0
    return call.out


def make_call(
    world: World,
    query: Query,
    order: list[int],
    rule: SplitRule,
    layer: LayerAttention = PLAIN,
    q_len: int = 1,
) -> DecodeCall:
    """A planned batch of some requests; partial results are NaN."""
    planned = run_plan_decode(world, rule, order=order)
    parts = planned.work.records.shape[0] * q_len
    partial = Partial.empty(parts, world.num_q_heads, world.layout.v_head_dim, world.device)
    index = [b * q_len + t for b in order for t in range(q_len)]
    for buffer in (partial.out, partial.top, partial.total):
        buffer.fill_(torch.nan)
    return DecodeCall(
        strided(Query(*(None if part is None else part[index].contiguous() for part in query))),
        world.cache,
        planned.page_table,
        planned.seq_lens,
        planned.work,
        len(order),
        partial,
        world.empty_out(len(index)),
        layer,
        q_len,
        split_chunks=rule.split_chunks,
    )


def check(
    world: World,
    query: Query,
    out: torch.Tensor,
    layer: LayerAttention = PLAIN,
    q_len: int = 1,
) -> None:
    q = query.dequantize()
    for b in range(len(world.lens)):
        rows = slice(b * q_len, (b + 1) * q_len)
        assert_as_accurate(out[rows], world, b, q[rows], layer)


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("kvfp4", "kvfp4"),
        ("mxfp4", "mxfp4"),
        ("bf16", "bf16"),
        ("mxfp8", "nvfp4"),
    ],
)
def test_formats_and_pages(k: str, v: str, page: int, device: torch.device) -> None:
    world = make_world([0, 1, 90, 200], device, k=k, v=v, page=page)
    query = world.queries(4, quantized=k == "mxfp8")
    check(world, query, run_decode(world, query))


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "k", "v"),
    [
        (96, 96, "mxfp8", "mxfp8"),
        (96, 96, "nvfp4", "kvfp4"),
        (128, 128, "mxfp8", "nvfp4"),
        (256, 256, "kvfp4", "mxfp8"),
        (192, 128, "mxfp8", "mxfp8"),
        (80, 48, "nvfp4", "bf16"),
        (160, 96, "mxfp4", "mxfp4"),
    ],
)
def test_head_sizes(k_dim: int, v_dim: int, k: str, v: str, device: torch.device) -> None:
    world = make_world([70, 130], device, k=k, v=v, k_dim=k_dim, v_dim=v_dim, kv_heads=1)
    query = world.queries(2)
    check(world, query, run_decode(world, query))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 17, 64])
def test_groups(group: int, device: torch.device) -> None:
    world = make_world([100], device, group=group)
    query = world.queries(1)
    check(world, query, run_decode(world, query))


def test_lengths_around_every_border(device: torch.device) -> None:
    lens = [n + d for n in (64, 128, 192, 256, 320, 512) for d in (-1, 0, 1)]
    world = make_world([0, 1, 2, *lens], device, kv_heads=1, group=1, page=128)
    query = world.queries(len(world.lens))
    check(world, query, run_decode(world, query))


def test_float16_model_keeps_every_bit_of_its_query(device: torch.device) -> None:
    world = make_world([64], device, dtype=torch.float16, group=1, kv_heads=1)
    # Two keys that only the last bit of a float16 query tells apart, and V that says which won.
    q = torch.zeros(1, 1, 64, dtype=torch.float16)
    q[0, 0, 0], q[0, 0, 1] = 1 + 2**-10, 1
    slots = slots_of(world, 0)
    world.cache.k_data[slots] = 0
    world.cache.k_data[slots[5], 0, 0] = 2.0**15
    world.cache.k_data[slots[9], 0, 1] = 2.0**15
    query = Query(q.to(device))
    check(world, query, run_decode(world, query, layer=UNIT), layer=UNIT)


def test_float16_model_with_keys_beyond_float16(device: torch.device) -> None:
    world = make_world([90], device, dtype=torch.float16, k_scale=3e5)
    query = world.queries(1, scale=1e-5)
    check(world, query, run_decode(world, query))


def test_long_rows_of_large_logits(device: torch.device) -> None:
    world = make_world([300], device, k_scale=30.0)
    query = world.queries(1, scale=10.0)
    check(world, query, run_decode(world, query, layer=UNIT), layer=UNIT)


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4", "kvfp4", "mxfp4"])
@pytest.mark.parametrize(("k_size", "v_size"), [(1e6, 1e-7), (1e-9, 1e7), (1.0, 0.0), (3e4, 1e-30)])
def test_sizes_beyond_float16(k: str, k_size: float, v_size: float, device: torch.device) -> None:
    world = make_world([90, 200], device, k=k, k_dim=128)
    if world.cache.k_global is not None and world.cache.v_global is not None:
        world.cache.k_global.fill_(k_size / 64)
        world.cache.v_global.fill_(max(v_size, 1e-20) / 64)
    # Only some tokens are out of range, so that one split is and its neighbours are not.
    for b, size in ((0, k_size), (1, 1.0)):
        slots = slots_of(world, b)
        rows = torch.randn(len(slots), 2, 128, device=device)
        store(rows * size, rows * (v_size if b == 0 else 1.0), slots, world.cache)
    query = world.queries(2, scale=min(1.0, 1 / k_size))
    out = run_decode(world, query)
    assert out.isfinite().all()
    check(world, query, out)


def test_global_scales_are_not_swapped(device: torch.device) -> None:
    world = make_world([90], device, k="nvfp4")
    query = world.queries(1)
    right = run_decode(world, query)
    assert world.cache.v_global is not None
    world.cache.v_global.mul_(2)
    assert torch.equal(run_decode(world, query), right * 2)


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4"])
def test_a_request_has_the_same_bits_in_every_batch(k: str, device: torch.device) -> None:
    world = make_world([1, 1300, 64, 0, 513, 65], device, k=k, max_context=2048)
    query = world.queries(6)
    together = run_decode(world, query)
    for b in (1, 3, 4):
        assert torch.equal(run_decode(world, query, order=[b])[0], together[b])
    order = [4, 1, 1, 3, 5, 0, 2, 3]
    assert torch.equal(run_decode(world, query, order=order), together[order])


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("window", [None, 100, 1500])
def test_the_cut_of_the_work_changes_no_bit(
    k: str, window: int | None, device: torch.device
) -> None:
    if chosen is not decode_fast:
        pytest.skip("decode has one cut")
    world = make_world([1, 3000, 64, 1024, 700], device, k=k, k_dim=128, max_context=4096)
    query = world.queries(5)
    layer = replace(PLAIN, window=window)
    results = {}
    for programs, most_chunks in itertools.product((1, 1 << 20), (0, 100)):
        rule = SPLITS._replace(programs=programs, most_chunks=most_chunks, heads=2)
        results[programs, most_chunks] = run_decode(world, query, rule=rule, layer=layer)
    first = results.popitem()[1]
    assert {cut for cut, out in results.items() if not torch.equal(out, first)} == set()
    check(world, query, first, layer)


@pytest.mark.parametrize("k", ["mxfp8", "kvfp4"])
def test_one_negative_logit_out_of_range_is_noticed(k: str, device: torch.device) -> None:
    # In float16 its logit is -inf and its probability 0. It really is -5e-8, as good as the others.
    world = make_world([90], device, k=k, k_dim=128, group=1)
    slots = slots_of(world, 0)
    rows = torch.zeros(len(slots), 2, 128, device=device)
    rows[40] = -448 * 2.0**20
    store(rows, torch.randn(len(slots), 2, 128, device=device), slots, world.cache)
    query = Query(torch.full((1, 2, 128), 1e-18, dtype=world.dtype, device=device))
    check(world, query, run_decode(world, query))


def test_redo_computes_whole_splits(device: torch.device) -> None:
    world = make_world([1100, 90, 300], device, k="mxfp8", k_dim=128, max_context=2048)
    query = world.queries(3)
    heads = slice(world.group, 2 * world.group)  # of one KV head
    results = []
    for rule in (SPLITS, SPLITS._replace(most_chunks=100)):
        call = make_call(world, query, [0, 1, 2], rule)
        decode(call)
        for request in range(3):  # their first item: all but the last split of request 0
            item = int(call.work.indptr[request])
            call.partial.total[item, world.group] = torch.nan
            call.partial.out[item, heads] = 7.0
            call.out[request, heads] = 7.0
        call.partial.failures.fill_(3)
        decode_redo(call)
        merge(call)
        assert call.partial.failures.item() == 0
        check(world, query, call.out)
        results.append(call.out[:, heads])
    assert torch.equal(*results)


@pytest.mark.parametrize("tokens", [640, 1024])
def test_merge_does_not_care_how_the_work_was_cut(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and their folded splits, made up here, give the same bits, as many at once as may."""
    world = make_world([3000, 1030], device, kv_heads=1, group=2, max_context=4096)
    query = world.queries(2)
    rule = SPLITS._replace(min_tokens=tokens, max_tokens=tokens)
    chunked = make_call(world, query, [0, 1], rule._replace(most_chunks=100))
    coarse = make_call(world, query, [0, 1], rule)
    parts = int(chunked.work.indptr[2])
    fine, split = chunked.partial, coarse.partial
    fine.out[:parts] = torch.randn_like(fine.out[:parts])
    fine.top[:parts] = torch.randint(-3, 4, (parts, 2), device=device).float()
    fine.total[:parts] = torch.rand(parts, 2, device=device) + 1
    chunks = tokens // CHUNK_TOKENS  # 3000 tokens are 24 of them, 1030 nine
    firsts = [*range(0, 24, chunks), *range(24, 33, chunks), 33]
    for item, (first, end) in enumerate(itertools.pairwise(firsts)):
        top, total, out = torch.full_like(fine.top[0], -torch.inf), 0.0, 0.0
        for chunk in range(first, end):
            new_top = torch.maximum(top, fine.top[chunk])
            w, w_chunk = torch.exp2(top - new_top), torch.exp2(fine.top[chunk] - new_top)
            # Weights are powers of two: float64 holds the products, and is rounded once.
            total = (total * w.double() + fine.total[chunk].double() * w_chunk).float()
            out = (out * w.double()[:, None] + fine.out[chunk].double() * w_chunk[:, None]).float()
            top = new_top
        split.top[item], split.total[item], split.out[item] = top, total, out
    outs = []
    for at_once, call in itertools.product((8, 16, 32), (chunked, coarse)):
        monkeypatch.setattr(merging, "_AT_ONCE", at_once)
        monkeypatch.setattr(merging, "_AT_ONCE_WIDE", at_once)
        call.out.fill_(torch.nan)
        merge(call)
        outs.append(call.out.clone())
    assert outs[0].isfinite().all()
    assert [torch.equal(out, outs[0]) for out in outs] == [True] * 6


def test_padding_of_a_graph_changes_nothing(device: torch.device) -> None:
    world = make_world([70, 200, 1], device, k="mxfp8")
    world.rows[2] = 0  # page 0, as a captured batch pads itself: poison, in its own rows only
    query = world.queries(3)
    padded = run_decode(world, query)
    assert torch.equal(run_decode(world, query, order=[0, 1]), padded[:2])


@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_stays_in_its_request_and_head(side: str, device: torch.device) -> None:
    world = make_world([100, 200], device)
    query = world.queries(2)
    clean = run_decode(world, query)
    slot = slots_of(world, 1)[77]
    (world.cache.k_data if side == "k" else world.cache.v_data)[slot, 1] = torch.nan
    out = run_decode(world, query)
    assert out[1, 2:].isnan().all()
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[1, :2], clean[1, :2])


@pytest.mark.parametrize("length", [100, 600])
def test_an_infinite_value_gives_nan(length: int, device: torch.device) -> None:
    """As in extend, where it may meet a probability of zero."""
    world = make_world([length], device)
    query = world.queries(1)
    clean = run_decode(world, query)
    world.cache.v_data[slots_of(world, 0)[77], 1, 5] = torch.inf
    out = run_decode(world, query)
    assert out[0, 2:, 5].isnan().all()
    assert torch.equal(out[0, :2], clean[0, :2])
    assert out[0, 2:, :5].isfinite().all()
    assert out[0, 2:, 6:].isfinite().all()


@pytest.mark.parametrize("length", [1, 100, 600])
def test_nothing_but_infinitely_small_logits_gives_nan(length: int, device: torch.device) -> None:
    """Finite Q and K whose product float32 does not hold: no answer, and not zero either."""
    world = make_world([length, 5], device, group=1)
    world.cache.k_data[slots_of(world, 0)] = -3e38
    query = Query(torch.full((2, 2, 64), 3e38, dtype=world.dtype, device=device))
    out = run_decode(world, query)
    assert out[0].isnan().all()
    # A sink is as large as anything then, and has no value.
    sinks = torch.zeros(2, device=device)
    assert not run_decode(world, query, layer=LayerAttention(0.125, sinks=sinks))[0].any()


def test_the_oracle_notices_a_missing_token(device: torch.device) -> None:
    world = make_world([65], device)
    query = world.queries(1)
    out = run_decode(world, query)
    world.lens = [64]
    with pytest.raises(AssertionError, match="error"):
        check(world, query, out)
    assert attend_exactly(world, 0, query.data.float()).isfinite().all()
