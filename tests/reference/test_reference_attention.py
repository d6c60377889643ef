"""The reference attention against torch's own attention in float64 over dequantized rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference_store import PAIRS, make_cache

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.reference import attend, gather, store

SCALE = 0.2
PLAIN = LayerAttention(SCALE)


def filled(
    cache: LayerCache, lengths: list[int], seed: int = 0, std: float = 1.0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Store requests of the given lengths into shuffled pages; returns page_table, slots."""
    layout, gen = cache.layout, torch.Generator().manual_seed(seed)
    page = layout.page_size
    counts = [-(-n // page) for n in lengths]
    pages = 1 + torch.randperm(cache.num_pages - 1, generator=gen)
    # Beyond a request's pages the table holds numbers of pages that do not exist.
    table = torch.full((len(lengths), max([*counts, 1])), 1 << 20, dtype=torch.int32)
    slots, used = [], 0
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = pages[used : used + count]
        used += count
        t = torch.arange(n)
        slots.append(table[b, t // page].long() * page + t % page)
        shape = n, layout.num_kv_heads
        k = std * torch.randn(*shape, layout.k_head_dim, generator=gen)
        v = torch.randn(*shape, layout.v_head_dim, generator=gen)
        store(k, v, slots[-1], cache)
    return table, slots


def oracle(q: torch.Tensor, cache: LayerCache, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 attention of the last rows of one request, by torch."""
    k, v = (gather(slots, cache, side, torch.float64) for side in ("k", "v"))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    n, length = q.shape[0], len(slots)
    mask = torch.arange(length) <= (length - n + torch.arange(n))[:, None]
    out = F.scaled_dot_product_attention(
        q.double().transpose(0, 1), k, v, attn_mask=mask, scale=scale
    )
    return out.transpose(0, 1)


def run(cache, table, lengths, q_lens, query, layer=PLAIN) -> torch.Tensor:
    bounds = torch.tensor([0, *q_lens]).cumsum(0).int()
    shape = (*query.data.shape[:2], cache.layout.v_head_dim)
    out = torch.full(shape, torch.nan)
    lens = torch.tensor(lengths, dtype=torch.int32)
    got = attend(query, cache, table, lens, bounds, layer=layer, out=out)
    assert got is out
    return out


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_equals_torch(k_format: str, v_format: str, group: int, monkeypatch) -> None:
    # Small, so that a request's rows take several chunks.
    monkeypatch.setattr("inkling_backend.reference.attention._TILE", 5)
    cache = make_cache(k_format, v_format, page=32, pages=12)
    lengths, q_lens = [1, 31, 32, 65, 0, 40], [1, 1, 32, 20, 1, 40]
    table, slots = filled(cache, lengths)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(sum(q_lens), 2 * group, 64, generator=gen).bfloat16()
    query = Query.quantize(q) if k_format == "mxfp8" else Query(q)
    out = run(cache, table, lengths, q_lens, query)
    values, start = query.dequantize(), 0
    for b, n in enumerate(q_lens):
        got = out[start : start + n]
        if lengths[b] == 0:
            assert torch.equal(got, torch.zeros_like(got))
        else:
            want = oracle(values[start : start + n], cache, slots[b], SCALE)
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        start += n


def test_rows_before_the_first_position_are_zero() -> None:
    cache = make_cache(page=32, pages=4)
    table, slots = filled(cache, [3])
    q = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2))
    out = run(cache, table, [3], [5], Query(q))
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    want = oracle(q[2:], cache, slots[0], SCALE)
    torch.testing.assert_close(out[2:].double(), want, rtol=2e-5, atol=2e-5)


def test_huge_logits_do_not_overflow() -> None:
    cache = make_cache(page=32, pages=4)
    table, slots = filled(cache, [40], std=300.0)
    q = 300 * torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(3))
    out = run(cache, table, [40], [4], Query(q), layer=LayerAttention(1.0))
    want = oracle(q, cache, slots[0], 1.0)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_non_finite_reaches_only_rows_that_see_it(
    side: str, k_format: str, v_format: str, bad: float
) -> None:
    cache = make_cache(k_format, v_format, page=32, pages=4)
    table, slots = filled(cache, [40])
    q = torch.randn(40, 4, 64, generator=torch.Generator().manual_seed(4))
    before = run(cache, table, [40], [40], Query(q))
    k = torch.ones(1, 2, 64)
    v = torch.ones(1, 2, 96)
    (k if side == "k" else v)[0, 1, 0] = bad
    store(k, v, slots[0][25:26], cache)
    out = run(cache, table, [40], [40], Query(q))
    assert torch.equal(out[:25], before[:25])
    assert out[25:, :2].isfinite().all()
    if (side, k_format, bad) != ("k", "bf16", torch.inf):  # a logit of -inf is an ordinary weight 0
        assert not out[25:, 2:, 0].isfinite().any()
    if side == "v":
        fmt = cache.layout.v_format
        block = fmt.block if fmt.element_bits == 4 else 1  # E2M1 has no NaN: a block has
        assert out[25:, 2:, block:].isfinite().all()
    # One row alone, as in decode.
    last = run(cache, table, [40], [1], Query(q[39:]))
    assert torch.equal(last.isnan(), out[39:].isnan())
    assert not last.isinf().any()


def test_bytes_outside_a_request_are_never_seen() -> None:
    results = []
    for poison in (0x00, 0xFF):
        cache = make_cache("mxfp8", "kvfp4", page=32, pages=6)
        for name in ("k_data", "v_data", "k_scale", "v_scale"):
            getattr(cache, name).fill_(poison)
        table, _ = filled(cache, [33, 20])
        q = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(5))
        results.append(run(cache, table, [33, 20], [4, 1], Query(q)))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_ragged_batches(lengths: list[int], data: st.DataObject) -> None:
    q_lens = [data.draw(st.integers(0, max(n, 1))) for n in lengths]
    cache = make_cache("mxfp8", "nvfp4", page=32, pages=12)
    table, slots = filled(cache, lengths)
    q = torch.randn(sum(q_lens), 4, 64, generator=torch.Generator().manual_seed(6))
    out = run(cache, table, lengths, q_lens, Query(q))
    start = 0
    for b, n in enumerate(q_lens):
        got = out[start : start + n]
        want = torch.zeros_like(got).double()
        if n and lengths[b]:
            want = oracle(q[start : start + n], cache, slots[b], SCALE)
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        start += n


def test_bad_shapes_are_named() -> None:
    cache = make_cache(page=32)
    table, lens, bounds = torch.ones(1, 1).int(), torch.tensor([1]), torch.tensor([0, 1])
    q, out = torch.zeros(1, 4, 64), torch.zeros(1, 4, 96)
    for match, args, result in (
        ("query: expected shape", (Query(q[:, :3]), cache, table, lens, bounds), out),
        ("out: expected shape", (Query(q), cache, table, lens, bounds), out[..., :64]),
        ("page_table: expected shape", (Query(q), cache, table[0], lens, bounds), out),
        ("qo_indptr: expected shape", (Query(q), cache, table, lens, bounds[:1]), out),
    ):
        with pytest.raises(InvalidTensorError, match=match):
            attend(*args, layer=LayerAttention(1.0), out=result)
