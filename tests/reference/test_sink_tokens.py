"""Sink tokens in the reference: which rows are kept in BF16, and who reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.cache import KVCachePool
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.reference import attend, store
from inkling_backend.transforms import KeyTransform
from tests.attention.world import PLAIN, attend_exactly, make_world, slots_of

CPU = torch.device("cpu")


def make_cache(k: str, v: str, sink_tokens: int = 3) -> LayerCache:
    layout = CacheLayout(get_format(k), get_format(v), 2, 64, 96, 32, sink_tokens)
    pool = KVCachePool(layout, 1, 4, "cpu")
    for scale in (pool.k_global, pool.v_global):
        if scale is not None:
            scale.fill_(0.3)
    return pool.layer(0)


def test_the_first_tokens_of_every_page_are_kept() -> None:
    cache = make_cache("nvfp4", "mxfp8")
    slots = torch.tensor([32, 34, 35, 97, 0, -3, 1])
    k, v = torch.randn(7, 2, 64), torch.randn(7, 2, 96)
    store(k, v, slots, cache)
    assert cache.k_first is not None
    assert cache.v_first is not None
    for row, page, offset in ((0, 1, 0), (1, 1, 2), (3, 3, 1), (6, 0, 1)):
        assert torch.equal(cache.k_first[page, offset], (k[row] / 0.3).bfloat16())
        assert torch.equal(cache.v_first[page, offset], v[row].bfloat16())
    assert int(cache.k_first.any(-1).any(-1).sum()) == 4


def test_keys_are_kept_as_they_are_stored() -> None:
    cache = replace(make_cache("nvfp4", "nvfp4"), k_center=torch.randn(2, 64), rotates=True)
    k, v = torch.randn(1, 2, 64), torch.randn(1, 2, 96)
    store(k, v, torch.tensor([64]), cache)
    rows = KeyTransform(cache.k_center, rotates=True).key(k)
    assert cache.k_first is not None
    assert torch.equal(cache.k_first[2, 0], (rows[0] / torch.tensor(0.3)).bfloat16())


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4"])
def test_attention_reads_those_of_the_first_page(k: str) -> None:
    world = make_world([2, 100, 64], CPU, k=k, sink_tokens=3, kv_heads=1)
    query, q_lens = world.queries(2 + 7 + 1), [2, 7, 1]
    cache = world.cache
    assert cache.k_first is not None
    assert cache.v_first is not None

    def run() -> torch.Tensor:
        bounds = torch.tensor([0, *q_lens]).cumsum(0)
        out = torch.full((10, 2, 64), torch.nan)
        return attend(query, cache, world.page_table, world.seq_lens, bounds, layer=PLAIN, out=out)

    out, rows = run(), query.dequantize()
    for b, part in enumerate(rows.split(q_lens)):
        got = out.split(q_lens)[b]
        torch.testing.assert_close(got.double(), attend_exactly(world, b, part), atol=1e-5, rtol=0)
    # Neither their own codes nor the rows of other pages are read.
    for b in range(3):
        slots = slots_of(world, b)
        cache.k_data[slots[:3]] = cache.v_data[slots[:3]] = 0x7F
        cache.k_first[slots[64::64] // 64] = torch.nan
    cache.v_first[slots_of(world, 0)[0] // 64, 2] = torch.nan
    assert torch.equal(run(), out)


def test_less_error_where_the_first_token_takes_most() -> None:
    q = torch.randn(1, 4, 64)
    k, v = torch.randn(200, 2, 64), torch.randn(200, 2, 64)
    k[0] = q[0, ::2] * 2.0
    errors = []
    for tokens in (0, 1):
        world = make_world([200], CPU, k="nvfp4", sink_tokens=tokens)
        store(k, v, slots_of(world, 0), world.cache)
        seen = attend_exactly(world, 0, q)
        p = torch.einsum("hd,thd->ht", q[0], k.repeat_interleave(2, 1)).mul(0.125).softmax(-1)
        exact = torch.einsum("ht,thd->hd", p, v.repeat_interleave(2, 1))
        errors.append((seen[0] - exact).norm())
    assert errors[1] < 0.3 * errors[0]
