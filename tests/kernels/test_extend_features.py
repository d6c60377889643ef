"""Windows, soft-caps, sinks and bidirectional attention in extend, against exact attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from tests.attention.world import PLAIN, make_world, slots_of
from tests.kernels.test_decode_features import FEATURES, PAIRS, make_layer
from tests.kernels.test_extend import check, part, run_extend

BIDIRECTIONAL = replace(PLAIN, causal=False)


@pytest.mark.parametrize(("k", "v"), PAIRS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_format(k: str, v: str, causal: bool, device: torch.device) -> None:
    q_lens = [40, 1, 0, 65]
    world = make_world([40, 130, 10, 129], device, k=k, v=v)
    query = world.queries(sum(q_lens), quantized=k == "mxfp8")
    layer = make_layer(4, device)
    layer = layer if causal else replace(layer, causal=False, window=None)
    check(world, query, q_lens, run_extend(world, query, q_lens, layer=layer), layer)


@pytest.mark.parametrize("feature", [*FEATURES, "bidirectional"])
def test_each_feature_alone(feature: str, device: torch.device) -> None:
    world = make_world([90], device, k="mxfp8", group=3)
    query = world.queries(70)
    layer = BIDIRECTIONAL if feature == "bidirectional" else make_layer(6, device, feature)
    out = run_extend(world, query, [70], layer=layer)
    check(world, query, [70], out, layer)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, [70], out, PLAIN)


@pytest.mark.parametrize("window", [0, 1, 31, 63, 64, 65, 127, 128, 129, 149, 150, 1 << 30])
def test_window_edges(window: int, device: torch.device) -> None:
    world = make_world([150, 129], device, kv_heads=1, group=1)
    query = world.queries(150 + 66)
    layer = LayerAttention(0.125, window=window)
    check(world, query, [150, 66], run_extend(world, query, [150, 66], layer=layer), layer)


@pytest.mark.parametrize("window", [5, 64, 90])
def test_a_row_has_the_same_bits_in_every_chunk(window: int, device: torch.device) -> None:
    length = 150
    world = make_world([length], device, k="mxfp8", group=3, kv_heads=1)
    query = world.queries(length)
    layer = replace(make_layer(3, device), window=window)
    whole = run_extend(world, query, [length], layer=layer)
    for chunk in (1, 7, 64, 100):
        starts = range(0, length, chunk) if chunk > 1 else (0, 1, 63, 64, 65, 127, 128, 149)
        for start in starts:
            stop = min(start + chunk, length)
            rows = run_extend(
                world, part(query, start, stop), [stop - start], seq_lens=[stop], layer=layer
            )
            assert torch.equal(rows, whole[start:stop]), (chunk, start)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [10, 64, 100])
def test_non_finite_value_reaches_only_rows_that_see_it(
    bad: float, window: int, device: torch.device
) -> None:
    world = make_world([200], device)
    query = world.queries(200)
    layer = LayerAttention(0.125, window=window)
    clean = run_extend(world, query, [200], layer=layer)
    world.cache.v_data[slots_of(world, 0)[30], 1, -1] = bad
    out = run_extend(world, query, [200], layer=layer)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[30 : 31 + window, 2:, -1] = True
    assert out[seen].isnan().all()
    assert torch.equal(out[~seen], clean[~seen])


@pytest.mark.parametrize("window", [10, 64])
def test_nan_key_reaches_only_rows_that_see_it(window: int, device: torch.device) -> None:
    world = make_world([200], device)
    query = world.queries(200)
    layer = LayerAttention(0.125, window=window)
    clean = run_extend(world, query, [200], layer=layer)
    world.cache.k_data[slots_of(world, 0)[30], 1, -1] = torch.nan
    out = run_extend(world, query, [200], layer=layer)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[30 : 31 + window, 2:] = True
    assert out[seen].isnan().all()
    assert torch.equal(out[~seen], clean[~seen])


def test_bidirectional_rows_see_their_whole_request_only(device: torch.device) -> None:
    world = make_world([100, 70], device)
    query = world.queries(170)
    clean = run_extend(world, query, [100, 70], layer=BIDIRECTIONAL)
    world.cache.v_data[slots_of(world, 0)[99], 1] = torch.nan
    out = run_extend(world, query, [100, 70], layer=BIDIRECTIONAL)
    assert out[:100, 2:].isnan().all()
    assert torch.equal(out[:100, :2], clean[:100, :2])
    assert torch.equal(out[100:], clean[100:])


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_bidirectional_lengths(length: int, device: torch.device) -> None:
    world = make_world([length], device, kv_heads=1, group=3, dtype=torch.float16)
    query = world.queries(length)
    out = run_extend(world, query, [length], layer=BIDIRECTIONAL)
    check(world, query, [length], out, BIDIRECTIONAL)


def test_sinks_of_every_size(device: torch.device) -> None:
    world = make_world([80], device, kv_heads=2, group=4)
    query = world.queries(80)
    sizes = [-torch.inf, -6e4, 0.0, 3.0, 100.0, 6e4, torch.inf, torch.nan]
    layer = LayerAttention(0.125, sinks=torch.tensor(sizes, device=device).bfloat16())
    out = run_extend(world, query, [80], layer=layer)
    assert torch.equal(out[:, :2], run_extend(world, query, [80])[:, :2])
    assert not out[:, 4:6].any()
    assert out[:, 6:].isnan().all()
    # The oracle's sinks must be finite in the heads that it compares.
    finite = replace(layer, sinks=layer.sinks.nan_to_num(0, 0, -6e4))
    fixed = run_extend(world, query, [80], layer=finite)
    check(world, query, [80], fixed, finite)
    assert torch.equal(fixed[:, :6], out[:, :6])
