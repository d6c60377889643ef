"""Sink tokens: their rows in BF16, in every kernel that writes or reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels import store as store_kernels
from inkling_backend.kernels.stage import stage
from inkling_backend.reference.store import store as reference_store
from tests.attention.world import (
    PLAIN,
    World,
    assert_as_accurate,
    make_world,
    rows_of,
    slots_of,
)
from tests.kernels.helpers import (
    STORED_NAMES,
    assert_same_bits,
    assert_same_cache,
    clone_cache,
    make_cache,
    make_layout,
    special_rows,
)
from tests.kernels.test_decode import check, kernel, run_decode  # noqa: F401
from tests.kernels.test_decode_features import make_layer
from tests.kernels.test_extend import check as check_extend
from tests.kernels.test_extend import run_extend

QUANTIZED = [name for name in STORED_NAMES if name != "bf16"]


def with_sinks(layout: CacheLayout, tokens: int) -> CacheLayout:
    return replace(layout, sink_tokens=tokens)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("transforms", [False, True])
def test_the_store_writes_what_the_reference_writes(
    name: str, transforms: bool, device: torch.device
) -> None:
    layout = with_sinks(make_layout(name, "nvfp4", 2, 64, 96), 3)
    cache = make_cache(layout, 3, device)
    if transforms:
        center = torch.randn(2, 64, device=device)
        cache = replace(cache, k_center=center, rotates=True)
    slots = torch.tensor([32, 33, 34, 35, 0, -1, 64, 95, 66, 1, 3, 96], device=device)
    k, v = (special_rows(len(slots), 2, dim, torch.bfloat16).to(device) for dim in (64, 96))
    want, before = clone_cache(cache), clone_cache(cache)
    reference_store(k[:-1], v[:-1], slots[:-1], want)
    store_kernels.store(k, v, slots, cache)
    assert_same_cache(cache, want)
    # Of page 1 three tokens, of page 2 the first and the third, of page 0 the second.
    assert before.k_first is not None
    assert cache.k_first is not None
    changed = (cache.k_first.view(torch.int16) != before.k_first.view(torch.int16)).any(-1).any(-1)
    assert changed.tolist() == [[False, True, False], [True] * 3, [True, False, True]]


def test_rows_are_those_before_they_were_quantized(device: torch.device) -> None:
    layout = with_sinks(make_layout("nvfp4", "kvfp4", 2, 64), 2)
    cache = make_cache(layout, 2, device, k_global=0.5)
    k, v = (torch.randn(2, 2, 64, dtype=torch.bfloat16).to(device) for _ in "kv")
    store_kernels.store(k, v, torch.tensor([32, 33], device=device), cache)
    assert cache.k_first is not None
    assert cache.v_first is not None
    assert torch.equal(cache.k_first[1] * 0.5, k)
    assert torch.equal(cache.v_first[1], v)


def worlds(k: str, v: str, device: torch.device, *, sink_tokens: int = 3, **more: int) -> World:
    sizes = {"kv_heads": 1, "max_context": 128, **more}
    return make_world([0, 2, 4, 70], device, k=k, v=v, sink_tokens=sink_tokens, **sizes)


@pytest.mark.parametrize(("k", "v"), [("mxfp8", "nvfp4"), ("nvfp4", "kvfp4"), ("kvfp4", "mxfp8")])
def test_decode_reads_them(k: str, v: str, device: torch.device) -> None:
    world = worlds(k, v, device)
    query = world.queries(4)
    out = run_decode(world, query)
    check(world, query, out)
    assert world.cache.k_first is not None
    world.cache.k_first[:] = torch.randn_like(world.cache.k_first)
    other = run_decode(world, query)
    check(world, query, other)
    assert not torch.equal(out[1:], other[1:])


def test_only_those_of_the_first_page_are_read(device: torch.device) -> None:
    world = worlds("nvfp4", "nvfp4", device)
    query = world.queries(4)
    out = run_decode(world, query)
    assert world.cache.v_first is not None
    for b, length in enumerate(world.lens):
        pages = slots_of(world, b)[::64] // 64
        world.cache.v_first[pages[1:]] = torch.nan
        if 0 < length < 3:
            world.cache.v_first[pages[0], length:] = torch.nan
    world.cache.v_first[0] = torch.nan
    assert torch.equal(run_decode(world, query), out)


def test_their_own_codes_are_not_read(device: torch.device) -> None:
    world = worlds("mxfp8", "mxfp8", device)
    query = world.queries(4)
    out = run_decode(world, query)
    slots = torch.cat([slots_of(world, b)[:3] for b in range(len(world.lens))])
    world.cache.k_data[slots] = world.cache.v_data[slots] = 0x38
    assert torch.equal(run_decode(world, query), out)
    # `decode_fast` leaves these to the exact kernel, which rounds otherwise.
    world.cache.k_data[slots] = world.cache.v_data[slots] = 0x7F
    check(world, query, run_decode(world, query))


@pytest.mark.parametrize("window", [1, 67, 1000])
def test_with_every_feature(window: int, device: torch.device) -> None:
    world = worlds("nvfp4", "nvfp4", device)
    query = world.queries(4)
    layer = replace(make_layer(2, device), window=window)
    check(world, query, run_decode(world, query, layer=layer), layer)


@pytest.mark.parametrize("window", [None, 66])
def test_several_query_tokens(window: int | None, device: torch.device) -> None:
    world = make_world([3, 5, 70], device, k="nvfp4", kv_heads=1, group=1, sink_tokens=4)
    query = world.queries(9)
    layer = LayerAttention(0.125, window=window)
    check(world, query, run_decode(world, query, q_len=3, layer=layer), layer, 3)


def test_trees(device: torch.device) -> None:
    world = make_world([4, 70], device, k="nvfp4", kv_heads=1, group=1, sink_tokens=4)
    query = world.queries(6)
    tree = torch.tensor([0b001, 0b011, 0b101], device=device).expand(2, 3).contiguous()
    out = run_decode(world, query, q_len=3, tree=tree)
    for b, rows in enumerate(query.dequantize().split(3)):
        assert_as_accurate(out.split(3)[b], world, b, rows, tree=tree[b])


def test_nan_of_one_is_seen_from_it_on(device: torch.device) -> None:
    world = make_world([4, 90], device, k="nvfp4", sink_tokens=4)
    query = world.queries(6)
    assert world.cache.v_first is not None
    page = slots_of(world, 0)[0] // world.layout.page_size
    world.cache.v_first[page, 2, 0] = torch.nan
    out = run_decode(world, query, q_len=3).unflatten(0, (2, 3))
    assert out[0, 1:, :2].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[0, :, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_a_request_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    world = make_world([1, 0, 300], device, k="nvfp4", kv_heads=1, group=1, sink_tokens=4)
    query = world.queries(3)
    together = run_decode(world, query)
    for b in (0, 2):
        assert torch.equal(run_decode(world, query, order=[b])[0], together[b])
    check(world, query, together)


@pytest.mark.parametrize("feature", ["plain", "window"])
def test_extend_reads_them(feature: str, device: torch.device) -> None:
    world = make_world([5, 130], device, k="nvfp4", v="mxfp8", sink_tokens=4)
    layer = PLAIN if feature == "plain" else make_layer(4, device, feature)
    query = world.queries(71)
    out = run_extend(world, query, [5, 66], layer=layer)
    check_extend(world, query, [5, 66], out, layer)
    assert world.cache.v_first is not None
    world.cache.v_first[:] = torch.randn_like(world.cache.v_first)
    check_extend(world, query, [5, 66], run_extend(world, query, [5, 66], layer=layer), layer)


def test_extend_has_the_same_bits_in_every_chunk(device: torch.device) -> None:
    world = make_world([70], device, k="nvfp4", kv_heads=1, group=1, sink_tokens=4)
    query = world.queries(70)
    whole, first = run_extend(world, query, [70]), 0
    for stop in (3, 64, 70):
        part = Query(query.data[first:stop])
        chunk = run_extend(world, part, [stop - first], seq_lens=[stop])
        assert torch.equal(chunk, whole[first:stop])
        first = stop


def test_copies_have_them(device: torch.device) -> None:
    world = make_world([2, 90], device, k="nvfp4", v="mxfp8", sink_tokens=3)
    heads, lens = world.layout.num_kv_heads, world.lens
    k_out, v_out = (torch.zeros(heads, 92, 64, dtype=torch.bfloat16, device=device) for _ in "kv")
    stage(
        world.cache,
        page_table=world.page_table.clamp(max=world.cache.num_pages - 1).contiguous(),
        rows=torch.tensor([[0, 2], [2, 90]], dtype=torch.int32, device=device),
        first=0,
        last=2,
        longest=max(lens),
        first_head=0,
        k_out=k_out,
        v_out=v_out,
        marks=torch.zeros(2, heads, dtype=torch.int32, device=device),
    )
    world.cache.k_global.fill_(1.0)  # stays out of copies
    for copied, side in ((k_out, "k"), (v_out, "v")):
        rows = torch.cat([rows_of(world, slots_of(world, b), side) for b in range(2)])
        assert_same_bits(copied.transpose(0, 1), rows.bfloat16(), side)
