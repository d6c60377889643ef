"""Relative biases in decode and extend, against exact attention over the dequantized cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from tests.attention.world import PLAIN, World, assert_as_accurate, make_world, slots_of
from tests.kernels.test_decode import run_decode
from tests.kernels.test_extend import part, run_extend

# Formats of K and V, and a window.
CASES = [("mxfp8", "mxfp8", 47), ("nvfp4", "nvfp4", None), ("bf16", "bf16", 47)]


def biased(
    world: World,
    rows: int,
    extent: int,
    layer: LayerAttention = PLAIN,
    dtype: torch.dtype = torch.bfloat16,
) -> LayerAttention:
    """Large random biases, as a slice of something wider; NaN around them."""
    bias = torch.full((rows, world.num_q_heads + 1, extent + 3), torch.nan, dtype=dtype)
    bias[:, 1:, :extent] = torch.randn(rows, world.num_q_heads, extent) * 2
    return replace(layer, bias=bias.to(world.device)[:, 1:, :extent])


def of_rows(layer: LayerAttention, start: int, stop: int) -> LayerAttention:
    """The layer for some rows of the query."""
    assert layer.bias is not None
    return replace(layer, bias=layer.bias[start:stop])


def check(
    world: World, query: Query, q_lens: list[int], out: torch.Tensor, layer: LayerAttention
) -> None:
    q, start = query.dequantize(), 0
    for b, n in enumerate(q_lens):
        stop = start + n
        if n:
            rows = layer if layer.bias is None else of_rows(layer, start, stop)
            assert_as_accurate(out[start:stop], world, b, q[start:stop], rows)
        start = stop


@pytest.mark.parametrize(("k", "v", "window"), CASES)
def test_decode(k: str, v: str, window: int | None, device: torch.device) -> None:
    world = make_world([0, 1, 90, 300], device, k=k, v=v)
    query = world.queries(4, quantized=k == "mxfp8")
    layer = biased(world, 4, 48, replace(PLAIN, window=window))
    out = run_decode(world, query, layer=layer)
    check(world, query, [1] * 4, out, layer)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, [1] * 4, out, replace(layer, bias=None))


@pytest.mark.parametrize("q_lens", [[1, 1], [9, 65]], ids=["decode", "extend"])
def test_over_sink_tokens(q_lens: list[int], device: torch.device) -> None:
    world = make_world([9, 70], device, k="nvfp4", v="kvfp4", sink_tokens=3)
    rows = sum(q_lens)
    query, layer = world.queries(rows), biased(world, rows, 80)
    if max(q_lens) == 1:
        out = run_decode(world, query, layer=layer)
    else:
        out = run_extend(world, query, q_lens, layer=layer)
    check(world, query, q_lens, out, layer)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, q_lens, out, replace(layer, bias=None))


@pytest.mark.parametrize(("k", "v", "window"), CASES)
def test_extend(k: str, v: str, window: int | None, device: torch.device) -> None:
    q_lens = [40, 1, 0, 65]
    world = make_world([40, 130, 10, 129], device, k=k, v=v)
    query = world.queries(sum(q_lens), quantized=k == "mxfp8")
    layer = biased(world, sum(q_lens), 48, replace(PLAIN, window=window))
    out = run_extend(world, query, q_lens, layer=layer)
    check(world, query, q_lens, out, layer)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, q_lens, out, replace(layer, bias=None))


@pytest.mark.parametrize("extent", [1, 32, 65, 130, 1000])
def test_extents(extent: int, device: torch.device) -> None:
    world = make_world([130, 66], device, kv_heads=1, group=1, dtype=torch.float16)
    layer = biased(world, 68, extent, dtype=torch.float32)
    query = world.queries(68)
    check(world, query, [2, 66], run_extend(world, query, [2, 66], layer=layer), layer)
    single = Query(query.data[:2])
    layer = of_rows(layer, 0, 2)
    check(world, single, [1, 1], run_decode(world, single, layer=layer), layer)


def test_with_every_other_feature(device: torch.device) -> None:
    world = make_world([90], device, k="mxfp8", group=3)
    sinks = torch.linspace(-1, 6, 6, device=device)
    layer = biased(world, 70, 40, LayerAttention(0.125, window=37, softcap=1.5, sinks=sinks))
    query = world.queries(70)
    check(world, query, [70], run_extend(world, query, [70], layer=layer), layer)
    last, layer = part(query, 69, 70), of_rows(layer, 69, 70)
    check(world, last, [1], run_decode(world, last, layer=layer), layer)


def test_several_tokens(device: torch.device) -> None:
    world = make_world([4, 259], device, k="nvfp4")
    query, layer = world.queries(8), biased(world, 8, 100)
    out = run_decode(world, query, layer=layer, q_len=4)
    check(world, query, [4, 4], out, layer)


def test_a_row_has_the_same_bits_in_every_chunk(device: torch.device) -> None:
    world = make_world([150], device, k="mxfp8", group=3, kv_heads=1)
    query, layer = world.queries(150), biased(world, 150, 70)
    whole = run_extend(world, query, [150], layer=layer)
    for start, stop in ((0, 64), (100, 150), (149, 150)):
        rows = run_extend(
            world,
            part(query, start, stop),
            [stop - start],
            seq_lens=[stop],
            layer=of_rows(layer, start, stop),
        )
        assert torch.equal(rows, whole[start:stop]), start


def test_a_request_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    world = make_world([1, 700, 64, 0], device, k="mxfp8", kv_heads=1)
    query, layer = world.queries(4), biased(world, 4, 500)
    together = run_decode(world, query, layer=layer)
    for order in ([1], [3, 1, 1, 0, 2]):
        assert layer.bias is not None
        again = replace(layer, bias=layer.bias[order])
        assert torch.equal(run_decode(world, query, order=order, layer=again), together[order])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_its_row_and_head(bad: float, device: torch.device) -> None:
    world = make_world([130], device)
    query, layer = world.queries(130), biased(world, 130, 100)
    clean = run_extend(world, query, [130], layer=layer)
    assert layer.bias is not None
    layer.bias[120, 1, 77] = bad
    out = run_extend(world, query, [130], layer=layer)
    hit = torch.zeros(out.shape, dtype=torch.bool, device=device)
    hit[120, 1] = True
    assert out[hit].isnan().all()
    assert torch.equal(out[~hit], clean[~hit])
    last = run_decode(world, part(query, 129, 130), layer=of_rows(layer, 120, 121))
    assert last[0, 1].isnan().all()
    assert last[0, [0, 2, 3]].isfinite().all()


def test_minus_infinity_hides_a_token(device: torch.device) -> None:
    world = make_world([90], device)
    query, layer = world.queries(1), biased(world, 1, 50)
    assert layer.bias is not None
    layer.bias[..., 7] = -torch.inf
    out = run_decode(world, query, layer=layer)
    world.cache.k_data[slots_of(world, 0)[82]] = 5.0
    world.cache.v_data[slots_of(world, 0)[82]] = 5.0
    assert torch.equal(run_decode(world, query, layer=layer), out)
    assert out.isfinite().all()
