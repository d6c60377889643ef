"""Windows, soft-caps and sinks in decode, against exact attention over the dequantized cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.kernels.configs import CHUNK_TOKENS
from tests.attention.world import PLAIN, make_world, slots_of
from tests.kernels.test_decode import check, kernel, run_decode  # noqa: F401

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("kvfp4", "kvfp4"),
    ("mxfp4", "mxfp4"),
    ("bf16", "bf16"),
    ("mxfp8", "nvfp4"),
]
FEATURES = ("window", "softcap", "sinks")


def make_layer(q_heads: int, device: torch.device, *features: str) -> LayerAttention:
    """A layer with some features; all of them if none is named."""
    values = {
        "window": 37,
        "softcap": 1.5,
        "sinks": torch.linspace(-1, 6, q_heads, device=device),
    }
    return replace(PLAIN, **{name: values[name] for name in features or FEATURES})


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_every_format(k: str, v: str, device: torch.device) -> None:
    world = make_world([0, 1, 90, 200], device, k=k, v=v)
    query = world.queries(4, quantized=k == "mxfp8")
    layer = make_layer(4, device)
    check(world, query, run_decode(world, query, layer=layer), layer)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dim", [64, 128])
def test_each_feature_alone(feature: str, dim: int, device: torch.device) -> None:
    world = make_world([90, 300], device, k="mxfp8", k_dim=dim)
    query = world.queries(2)
    layer = make_layer(4, device, feature)
    out = run_decode(world, query, layer=layer)
    check(world, query, out, layer)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, out, PLAIN)


@pytest.mark.parametrize("dim", [80, 96, 112, 160, 192, 224, 256])
def test_head_sizes(dim: int, device: torch.device) -> None:
    world = make_world([70], device, k="nvfp4", k_dim=dim, kv_heads=1, group=2)
    query = world.queries(1)
    layer = make_layer(2, device)
    check(world, query, run_decode(world, query, layer=layer), layer)


@pytest.mark.parametrize(
    "window", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 299, 300, 301, 1 << 30]
)
def test_window_edges(window: int, device: torch.device) -> None:
    """Lengths put the edge of the window one around every tile, page, split and chunk."""
    world = make_world([256, 257, 300, 319, 320, 321], device, kv_heads=1, group=1, page=64)
    query = world.queries(6)
    layer = LayerAttention(0.125, window=window)
    check(world, query, run_decode(world, query, layer=layer), layer)


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("window", [100, CHUNK_TOKENS, 700])
def test_a_request_has_the_same_bits_in_every_batch(
    k: str, window: int, device: torch.device
) -> None:
    world = make_world([1, 1300, 64, 0, 513, 65], device, k=k, kv_heads=1, max_context=2048)
    query = world.queries(6)
    layer = replace(make_layer(2, device), window=window)
    together = run_decode(world, query, layer=layer)
    for b in (1, 4):
        assert torch.equal(run_decode(world, query, order=[b], layer=layer)[0], together[b])
    order = [4, 1, 1, 3, 5, 0, 2, 3]
    assert torch.equal(run_decode(world, query, order=order, layer=layer), together[order])
    check(world, query, together, layer)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("token", [0, 48])
def test_nan_before_the_window_is_not_seen(side: str, token: int, device: torch.device) -> None:
    world = make_world([100], device)
    query = world.queries(1)
    layer = LayerAttention(0.125, window=50)  # from token 49 on
    slot = slots_of(world, 0)[token]
    # Zero is as invisible as NaN, and the oracle can multiply it.
    data = world.cache.k_data if side == "k" else world.cache.v_data
    data[slot] = torch.nan
    out = run_decode(world, query, layer=layer)
    data[slot] = 0.0
    check(world, query, out, layer)


def test_nan_within_the_window_is_seen(device: torch.device) -> None:
    world = make_world([100], device)
    world.cache.v_data[slots_of(world, 0)[49], 1] = torch.nan
    out = run_decode(world, world.queries(1), layer=LayerAttention(0.125, window=50))
    assert out[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()


@pytest.mark.parametrize("length", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_every_size(length: int, dtype: torch.dtype, device: torch.device) -> None:
    world = make_world([length], device, kv_heads=1, group=8, k="mxfp8", max_context=2048)
    query = world.queries(1)
    sizes = [-6e4, -30.0, -1.0, 0.0, 3.0, 9.0, 100.0, 6e4]
    layer = LayerAttention(0.125, sinks=torch.tensor(sizes, dtype=dtype, device=device))
    out = run_decode(world, query, layer=layer)
    check(world, query, out, layer)
    assert torch.equal(out[0, 0], run_decode(world, query)[0, 0])
    assert not out[0, -2:].any()


@pytest.mark.parametrize("length", [40, 1100])
def test_sinks_that_are_not_finite(length: int, device: torch.device) -> None:
    """As in torch's softmax: -inf takes no part; inf and NaN give NaN, to their head alone."""
    world = make_world([length], device, kv_heads=1, group=4, max_context=2048)
    query = world.queries(1)
    sinks = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0], device=device)
    out = run_decode(world, query, layer=LayerAttention(0.125, sinks=sinks))
    assert torch.equal(out[0, 0], run_decode(world, query)[0, 0])
    assert out[0, 1:3].isnan().all()
    assert out[0, 3].isfinite().all()


@pytest.mark.parametrize(("size", "cap"), [(30.0, 5.0), (1.0, 50.0), (1e-3, 1e-3), (3.0, 1e5)])
def test_soft_caps_of_every_size(size: float, cap: float, device: torch.device) -> None:
    world = make_world([300], device, k="mxfp8", k_dim=128, k_scale=size)
    query = world.queries(1)
    layer = LayerAttention(0.125, softcap=cap)
    check(world, query, run_decode(world, query, layer=layer), layer)


def test_a_cap_does_not_hide_what_is_not_a_number(device: torch.device) -> None:
    """tanh of infinity is 1: an infinite logit is an ordinary one; NaN is not."""
    world = make_world([90, 90], device, group=1)
    query = world.queries(2)
    layer = LayerAttention(0.125, softcap=2.0)
    for b, bad in enumerate((torch.inf, torch.nan)):
        world.cache.k_data[slots_of(world, b)[11], 1] = 0.0
        world.cache.k_data[slots_of(world, b)[11], 1, 5] = bad
    out = run_decode(world, query, layer=layer)
    assert out[1, 1].isnan().all()
    assert out[1, 0].isfinite().all()
    # A large number is capped like infinity, and the oracle can multiply it by zero.
    world.cache.k_data[slots_of(world, 0)[11], 1, 5] = 1e30
    world.lens = [90]
    check(world, Query(query.data[:1]), out[:1], layer)


@pytest.mark.parametrize("k", ["mxfp8", "kvfp4"])
def test_a_cap_does_not_hide_what_float16_cannot_hold(k: str, device: torch.device) -> None:
    from inkling_backend.reference.store import store

    world = make_world([90], device, k=k, k_dim=128, group=1)
    slots = slots_of(world, 0)
    rows = torch.zeros(len(slots), 2, 128, device=device)
    rows[40] = -448 * 2.0**20
    store(rows, torch.randn(len(slots), 2, 128, device=device), slots, world.cache)
    query = Query(torch.full((1, 2, 128), 1e-18, dtype=world.dtype, device=device))
    layer = LayerAttention(0.125, softcap=3.0)
    check(world, query, run_decode(world, query, layer=layer), layer)
