"""The reference's windows, soft-caps, sinks and bidirectional attention, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.reference import attend
from tests.attention.world import PLAIN, World, attend_exactly, make_world, slots_of

CPU = torch.device("cpu")
LAYERS = {
    "window": LayerAttention(0.125, window=20),
    "softcap": LayerAttention(0.125, softcap=1.5),
    "sinks": LayerAttention(0.125, sinks=torch.linspace(-1, 6, 4)),
    "bidirectional": LayerAttention(0.125, causal=False),
    "all of a decoder": LayerAttention(0.3, 33, 2.0, sinks=torch.linspace(-1, 6, 4).bfloat16()),
    "all of an encoder": LayerAttention(0.3, None, 2.0, False, torch.linspace(-1, 6, 4)),
}


def run(world: World, query: Query, q_lens: list[int], layer: LayerAttention) -> torch.Tensor:
    out = torch.full((*query.data.shape[:2], world.layout.v_head_dim), torch.nan)
    bounds = torch.tensor([0, *q_lens]).cumsum(0)
    return attend(
        query, world.cache, world.page_table, world.seq_lens, bounds, layer=layer, out=out
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("k", ["mxfp8", "nvfp4", "bf16"])
def test_equals_softmax_in_float64(name: str, k: str) -> None:
    lens, q_lens, layer = [100, 40, 64], [100, 1, 7], LAYERS[name]
    world = make_world(lens, CPU, k=k)
    query = world.queries(sum(q_lens), quantized=k == "mxfp8")
    out, plain = run(world, query, q_lens, layer), run(world, query, q_lens, PLAIN)
    assert not torch.allclose(out, plain, rtol=1e-2, atol=1e-2)
    start = 0
    for b, n in enumerate(q_lens):
        q = query.dequantize()[start : start + n]
        got = out[start : start + n].double()
        torch.testing.assert_close(got, attend_exactly(world, b, q, layer), rtol=2e-5, atol=2e-5)
        start += n


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 63, 64, 99, 100, 1 << 40])
def test_window_edges(window: int) -> None:
    world = make_world([100], CPU, page=32)
    query, layer = world.queries(100), LayerAttention(0.125, window=window)
    out = run(world, query, [100], layer).double()
    want = attend_exactly(world, 0, query.dequantize(), layer)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    one = run(world, Query(query.data[-1:]), [1], layer).double()
    torch.testing.assert_close(one, want[-1:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_reaches_only_rows_that_see_it(side: str) -> None:
    world = make_world([100], CPU)
    query, layer = world.queries(100), LayerAttention(0.125, window=20)
    clean = run(world, query, [100], layer)
    (world.cache.k_data if side == "k" else world.cache.v_data)[slots_of(world, 0)[30], 1] = (
        torch.nan
    )
    out = run(world, query, [100], layer)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[30:51, 2:] = True
    assert out[seen].isnan().all()
    torch.testing.assert_close(out[~seen], clean[~seen])


def test_rows_do_not_depend_on_their_chunk() -> None:
    world = make_world([128], CPU, page=32)
    query, layer = world.queries(128), replace(LAYERS["all of a decoder"], window=40)
    whole = run(world, query, [128], layer)
    for start in (32, 64, 96):
        rows = run(world, Query(query.data[start:]), [128 - start], layer)
        assert torch.equal(rows, whole[start:])


def test_sinks_that_are_not_finite() -> None:
    world = make_world([40], CPU)
    query = world.queries(40)
    sinks = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0])
    out = run(world, query, [40], replace(PLAIN, sinks=sinks))
    torch.testing.assert_close(out[:, 0], run(world, query, [40], PLAIN)[:, 0])
    assert out[:, 1:3].isnan().all()
    assert out[:, 3].isfinite().all()


def test_new_tokens_see_what_their_words_say() -> None:
    """As of a tree: the third of a request's five does not see the second."""
    lens = [5, 70]
    world = make_world(lens, CPU, k="nvfp4")
    query = world.queries(10)
    tree = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101] * 2)
    out = torch.full((10, world.num_q_heads, world.layout.v_head_dim), torch.nan)
    bounds = torch.tensor([0, 5, 10])
    pages = (world.page_table, world.seq_lens)
    attend(query, world.cache, *pages, bounds, layer=PLAIN, out=out, tree=tree)
    for b in range(2):
        rows = slice(5 * b, 5 * b + 5)
        want = attend_exactly(world, b, query.dequantize()[rows], tree=tree[rows])
        assert torch.allclose(out[rows].double(), want, atol=1e-5)
    assert not torch.allclose(out, run(world, query, [5, 5], PLAIN), atol=1e-3)
