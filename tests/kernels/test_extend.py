"""Extend against exact attention, and its independence of chunks and batches."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.kernels.extend import extend
from tests.attention.world import (
    PLAIN,
    World,
    assert_as_accurate,
    make_world,
    slots_of,
    strided,
)


def run_extend(
    world: World,
    query: Query,
    q_lens: list[int],
    *,
    order: list[int] | None = None,
    seq_lens: list[int] | None = None,
    layer: LayerAttention = PLAIN,
) -> torch.Tensor:
    """Attends the rows of ``query``, request after request; ``[T, Hq, Dv]``."""
    order = list(range(len(world.lens))) if order is None else order
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32).to(world.device)
    lens = [world.lens[b] for b in order] if seq_lens is None else seq_lens
    out = world.empty_out(query.data.shape[0])
    extend(
        strided(query),
        world.cache,
        page_table=world.page_table[order].contiguous(),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=world.device),
        qo_indptr=qo_indptr,
        batch=len(order),
        max_q_len=max(q_lens),
        out=out,
        layer=layer,
    )
    return out


def check(
    world: World,
    query: Query,
    q_lens: list[int],
    out: torch.Tensor,
    layer: LayerAttention = PLAIN,
) -> None:
    ends = torch.tensor(q_lens).cumsum(0).tolist()
    for b, (end, n) in enumerate(zip(ends, q_lens, strict=True)):
        if n:
            q = query.dequantize()[end - n : end]
            assert_as_accurate(out[end - n : end], world, b, q, layer)


def part(query: Query, start: int, stop: int) -> Query:
    """Some rows of a query."""
    return Query(*(None if x is None else x[start:stop].contiguous() for x in query))


@pytest.mark.parametrize(
    ("k", "v", "page"),
    [
        ("mxfp8", "mxfp8", 128),
        ("nvfp4", "nvfp4", 64),
        ("kvfp4", "kvfp4", 32),
        ("mxfp4", "mxfp4", 64),
        ("bf16", "bf16", 64),
        ("mxfp8", "nvfp4", 32),
    ],
)
def test_formats_and_pages(k: str, v: str, page: int, device: torch.device) -> None:
    q_lens = [40, 1, 0, 65]
    world = make_world([40, 130, 10, 129], device, k=k, v=v, page=page)
    query = world.queries(sum(q_lens), quantized=k == "mxfp8")
    check(world, query, q_lens, run_extend(world, query, q_lens))


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "k"),
    [(96, 96, "mxfp8"), (128, 128, "nvfp4"), (256, 256, "mxfp8"), (192, 128, "kvfp4")],
)
def test_head_sizes(k_dim: int, v_dim: int, k: str, device: torch.device) -> None:
    world = make_world([70], device, k=k, k_dim=k_dim, v_dim=v_dim, kv_heads=1)
    query = world.queries(20)
    check(world, query, [20], run_extend(world, query, [20]))


@pytest.mark.parametrize("group", [1, 3, 7, 16, 64])
def test_groups(group: int, device: torch.device) -> None:
    world = make_world([70], device, group=group)
    query = world.queries(9)
    check(world, query, [9], run_extend(world, query, [9]))


def test_float16_model(device: torch.device) -> None:
    world = make_world([90], device, dtype=torch.float16, k_scale=3e5)
    query = world.queries(30, scale=1e-5)
    check(world, query, [30], run_extend(world, query, [30]))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_lengths_around_every_border(length: int, device: torch.device) -> None:
    world = make_world([length], device, kv_heads=1, group=1)
    query = world.queries(length)
    check(world, query, [length], run_extend(world, query, [length]))


@pytest.mark.parametrize(("k", "group"), [("mxfp8", 3), ("bf16", 2)])
def test_a_row_has_the_same_bits_in_every_chunk(k: str, group: int, device: torch.device) -> None:
    length = 150
    world = make_world([length], device, k=k, group=group, kv_heads=1)
    query = world.queries(length)
    whole = run_extend(world, query, [length])
    for chunk in (1, 7, 64, 100):
        # Chunks of one token at the borders only: each is a launch.
        starts = range(0, length, chunk) if chunk > 1 else (0, 1, 63, 64, 65, 127, 128, 149)
        for start in starts:
            stop = min(start + chunk, length)
            rows = run_extend(world, part(query, start, stop), [stop - start], seq_lens=[stop])
            assert torch.equal(rows, whole[start:stop]), (chunk, start)


def test_a_request_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    q_lens = [33, 64, 5]
    world = make_world([33, 100, 70], device, k="nvfp4")
    query = world.queries(sum(q_lens))
    together = run_extend(world, query, q_lens)
    ends = torch.tensor(q_lens).cumsum(0).tolist()
    parts = [(end - n, end) for end, n in zip(ends, q_lens, strict=True)]
    for b, (start, stop) in enumerate(parts):
        alone = run_extend(world, part(query, start, stop), [stop - start], order=[b])
        assert torch.equal(alone, together[start:stop])
    order = [2, 0, 1]
    rows = [torch.arange(*parts[b]) for b in order]
    shuffled = Query(query.data[torch.cat(rows).to(device)])
    out = run_extend(world, shuffled, [q_lens[b] for b in order], order=order)
    assert torch.equal(out, together[torch.cat(rows).to(device)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["k", "v"])
def test_non_finite_token_reaches_only_rows_that_see_it(
    side: str, bad: float, device: torch.device
) -> None:
    world = make_world([140, 70], device)
    query = world.queries(210)
    clean = run_extend(world, query, [140, 70])
    # In the last element only, so that for V the other columns must stay as they were.
    (world.cache.k_data if side == "k" else world.cache.v_data)[slots_of(world, 0)[30], 1, -1] = bad
    out = run_extend(world, query, [140, 70])
    assert torch.equal(out[140:], clean[140:])
    assert torch.equal(out[:30], clean[:30])
    assert torch.equal(out[30:140, :2], clean[30:140, :2])
    if side == "v":
        assert out[30:140, 2:, -1].isnan().all()
        assert torch.equal(out[30:140, 2:, :-1], clean[30:140, 2:, :-1])
    elif bad != bad:
        assert out[30:140, 2:].isnan().all()
    chunk = run_extend(world, part(query, 60, 100), [40], order=[0], seq_lens=[100])
    assert torch.equal(chunk.nan_to_num(9.0), out[60:100].nan_to_num(9.0))


def test_nothing_but_infinitely_small_logits_gives_nan(device: torch.device) -> None:
    world = make_world([70], device, group=1)
    world.cache.k_data[slots_of(world, 0)[:40]] = -3e38
    query = Query(torch.full((70, 2, 64), 3e38, dtype=world.dtype, device=device))
    out = run_extend(world, query, [70])
    assert out[:40].isnan().all()


def test_rows_before_the_first_token_are_zero(device: torch.device) -> None:
    world = make_world([5], device)
    query = world.queries(8)
    out = run_extend(world, query, [8])
    assert not out[:3].any()
    assert out[3:].isfinite().all()


def test_rows_beyond_the_batch_are_left_alone(device: torch.device) -> None:
    world = make_world([20], device)
    query = world.queries(12)
    out = run_extend(world, query, [8])
    assert out[8:].isnan().all()
    check(world, part(query, 0, 8), [8], out[:8])
