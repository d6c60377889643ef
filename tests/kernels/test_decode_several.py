"""Decode of several query tokens, as speculation verifies them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from inkling_backend.kernels import decode_fast as fast
from inkling_backend.kernels.configs import CHUNK_TOKENS
from tests.attention.world import PLAIN, make_world, slots_of
from tests.kernels import test_decode
from tests.kernels.test_decode import SPLITS, check, kernel, run_decode  # noqa: F401
from tests.kernels.test_decode_features import FEATURES, PAIRS, make_layer

Q_LEN = 4
# The fast kernel takes both; in the interpreter the larger tells nothing more.
DIMS = [64, 128] if torch.cuda.is_available() else [64]


@pytest.mark.parametrize(("k", "v"), PAIRS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_format(k: str, v: str, dim: int, device: torch.device) -> None:
    world = make_world([4, 90, 200], device, k=k, v=v, k_dim=dim)
    query = world.queries(3 * Q_LEN, quantized=k == "mxfp8")
    check(world, query, run_decode(world, query, q_len=Q_LEN), q_len=Q_LEN)


@pytest.mark.parametrize(("group", "q_len"), [(1, 2), (1, 8), (3, 3), (7, 2), (4, 8), (8, 8)])
def test_groups(group: int, q_len: int, device: torch.device) -> None:
    world = make_world([100, 9], device, k="mxfp8", group=group, kv_heads=1, k_dim=128)
    query = world.queries(2 * q_len)
    check(world, query, run_decode(world, query, q_len=q_len), q_len=q_len)


def test_lengths_around_every_border(device: torch.device) -> None:
    """Where a border lies between the query tokens, the first ones see nothing behind it."""
    lens = [n + d for n in (64, 128, 256, 320, 1024) for d in (-1, 0, 1, 2, 3, 4)]
    world = make_world(
        [4, 5, *lens], device, kv_heads=1, group=1, page=128, k="mxfp8", max_context=2048
    )
    query = world.queries(len(world.lens) * Q_LEN)
    check(world, query, run_decode(world, query, q_len=Q_LEN), q_len=Q_LEN)


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, device: torch.device) -> None:
    world = make_world([90, 300], device, k="mxfp8", k_dim=128)
    query = world.queries(2 * Q_LEN)
    layer = make_layer(4, device, feature)
    out = run_decode(world, query, layer=layer, q_len=Q_LEN)
    check(world, query, out, layer, q_len=Q_LEN)
    with pytest.raises(AssertionError, match="error"):
        check(world, query, out, PLAIN, q_len=Q_LEN)


@pytest.mark.parametrize("window", [0, 1, 3, 63, 64, 127, 300])
def test_window_edges(window: int, device: torch.device) -> None:
    world = make_world([256, 257, 259, 320, 322], device, kv_heads=1, group=1, page=64)
    query = world.queries(5 * Q_LEN)
    layer = replace(PLAIN, window=window)
    check(world, query, run_decode(world, query, layer=layer, q_len=Q_LEN), layer, q_len=Q_LEN)


def test_a_request_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    world = make_world([1300, 64, 513, 66], device, k="mxfp8", kv_heads=1, max_context=2048)
    query = world.queries(4 * Q_LEN)
    together = run_decode(world, query, q_len=Q_LEN).unflatten(0, (4, Q_LEN))
    order = [3, 0, 0, 2, 1]
    again = run_decode(world, query, order=order, q_len=Q_LEN).unflatten(0, (5, Q_LEN))
    assert torch.equal(again, together[order])
    alone = run_decode(world, query, order=[0], q_len=Q_LEN)
    assert torch.equal(alone, together[0])


@pytest.mark.parametrize("window", [None, 100, 1500])
def test_the_cut_of_the_work_changes_no_bit(window: int | None, device: torch.device) -> None:
    if test_decode.chosen is not fast.decode_fast:
        pytest.skip("decode has one cut")
    world = make_world([5, 3001, 1025, 130], device, k="nvfp4", k_dim=128, max_context=4096)
    query = world.queries(4 * Q_LEN)
    layer = replace(PLAIN, window=window)
    results = {}
    for programs, most_chunks in itertools.product((1, 1 << 20), (0, 100)):
        rule = SPLITS._replace(programs=programs, most_chunks=most_chunks, heads=2)
        results[programs, most_chunks] = run_decode(
            world, query, rule=rule, layer=layer, q_len=Q_LEN
        )
    first = results.popitem()[1]
    assert {cut for cut, out in results.items() if not torch.equal(out, first)} == set()
    check(world, query, first, layer, q_len=Q_LEN)


@pytest.mark.parametrize("length", [100, CHUNK_TOKENS + 1])
def test_what_is_out_of_range_is_computed_again(length: int, device: torch.device) -> None:
    world = make_world([length], device, k="mxfp8", k_dim=128, k_scale=1e30)
    query = world.queries(Q_LEN, scale=1e-30)
    check(world, query, run_decode(world, query, q_len=Q_LEN), q_len=Q_LEN)


def test_a_token_does_not_see_those_behind_it(device: torch.device) -> None:
    world = make_world([CHUNK_TOKENS + 2], device, group=1, kv_heads=1)
    query = world.queries(Q_LEN)
    clean = run_decode(world, query, q_len=Q_LEN)
    last = slots_of(world, 0)[-1]
    world.cache.k_data[last] = 3.0
    world.cache.v_data[last] = 100.0
    out = run_decode(world, query, q_len=Q_LEN)
    assert torch.equal(out[:3], clean[:3])
    assert not torch.equal(out[3], clean[3])


def test_padding_gives_zeros(device: torch.device) -> None:
    world = make_world([0, 70], device)
    out = run_decode(world, world.queries(2 * Q_LEN), q_len=Q_LEN)
    assert not out[:Q_LEN].any()
    assert out[Q_LEN:].isfinite().all()


@pytest.mark.parametrize("length", [40, CHUNK_TOKENS + 2, 1030])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_no_token_before_it(
    bad: float, length: int, device: torch.device
) -> None:
    world = make_world([length], device, group=2, kv_heads=2, max_context=2048)
    query = world.queries(Q_LEN)
    clean = run_decode(world, query, q_len=Q_LEN)
    world.cache.v_data[slots_of(world, 0)[-2], 1, 5] = bad
    out = run_decode(world, query, q_len=Q_LEN)
    assert out[2:, 2:, 5].isnan().all()
    assert torch.equal(out[:, :2], clean[:, :2])
    for rows in (out[:2], out[2:, 2:, :5], out[2:, 2:, 6:]):
        assert rows.isfinite().all()
