"""What must hold for every model, cache and batch: one function for each kernel.

Each draws its case from the source that it is given and raises AssertionError if a property fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch

from inkling_backend import reference
from inkling_backend.attention import LayerAttention
from inkling_backend.formats import Query
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arch import capability_of
from inkling_backend.kernels.decode import DecodeCall, decode
from inkling_backend.kernels.decode_fast import config_for, decode_fast
from inkling_backend.kernels.gather import gather
from inkling_backend.kernels.merge import merge
from inkling_backend.kernels.store import store
from inkling_backend.reference.attention import attend
from tests.attention.world import World, slots_of
from tests.fuzz import draw, oracle
from tests.fuzz.draw import Limits, Model, Tally
from tests.kernels.helpers import (
    assert_same_bits,
    assert_same_cache,
    clone_cache,
    make_cache,
)
from tests.kernels.test_decode import make_call
from tests.kernels.test_extend import part, run_extend
from tests.kernels.test_plan import GARBAGE, run_plan_decode

# Rows of a request that are compared with the oracle: all would take longer than the rest.
MOST_ROWS = 40

Property = Callable[[random.Random, Model, Limits, torch.device], Tally]


def check_store(rng: random.Random, model: Model, limits: Limits, device: torch.device) -> Tally:
    """Store, and gather of what was stored, to the last byte of every buffer."""
    tally, layout = Tally(requests=1), model.layout
    scales = [rng.choice((1.0, 0.37, 1e-6, 12345.678, 3e-20, 1e20)) for _ in "kv"]
    pages = rng.randint(1, 3) if limits.rows < 100 else 32
    cache = make_cache(layout, pages, device, k_global=scales[0], v_global=scales[1])
    cache = draw.draw_transform(rng, cache)
    draw.fill(cache, rng.choice(draw.GARBAGE))
    num_slots = cache.k_data.shape[0]
    # Around the rows of a program: 4 in small batches, 16 in large ones, which few rows never are.
    edges = (0, 1, 3, 4, 5, 9) if limits.rows < 16 else (0, 1, 2, 3, 15, 16, 17, 255, 256, 257)
    tokens = min(limits.rows, num_slots - 1, rng.choice(edges))
    slots = torch.randperm(num_slots - 1)[:tokens] + 1
    for i in range(tokens):
        if rng.random() < 2 / tokens:
            slots[i] = rng.choice((0, -1, -(2**40), num_slots, num_slots + 1, 2**40))
            tally.faults += 1
    index = rng.choice((torch.int32, torch.int64))
    if index == torch.int32:
        slots.clamp_(-(2**31), 2**31 - 1)
    slots = slots.to(index)
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))

    def rows(heads: int, dim: int) -> torch.Tensor:
        return draw.draw_rows(rng, (tokens, heads, dim), tally).to(dtype)

    heads = layout.num_kv_heads
    k, v, q = (
        rows(heads, layout.k_head_dim),
        rows(heads, layout.v_head_dim),
        rows(model.q_heads, layout.k_head_dim),
    )
    want_cache = clone_cache(cache, torch.device("cpu"))
    held = torch.where(slots < num_slots, slots, 0)
    want = reference.store(k, v, held, want_cache, q=q, quantize_q=model.quantized)
    inputs = [draw.strided(rng, x.to(device)) for x in (k, v, q)]
    got = store(*inputs[:2], slots.to(device), cache, q=inputs[2], quantize_q=model.quantized)
    assert_same_cache(cache, want_cache)
    assert got is not None
    assert want is not None
    assert_same_bits(got.data.contiguous(), want.data, "q data")
    assert_same_bits(got.scale, want.scale, "q scale")

    asked = torch.cat([slots, torch.randint(-2, num_slots, (5,), dtype=index)])
    side = rng.choice("kv")
    read = gather(asked.to(device), cache, side, dtype)
    inside = torch.where(asked < num_slots, asked, 0)
    assert_same_bits(read, reference.gather(inside, want_cache, side, dtype), f"gathered {side}")
    return tally


def check_plan(rng: random.Random, model: Model, limits: Limits, device: torch.device) -> Tally:
    """The work list and the page tables of a decode batch."""
    lens = [draw.draw_length(rng, limits.tokens) for _ in range(rng.randint(1, 2 * limits.batch))]
    tally = Tally(requests=len(lens))
    world = draw.draw_world(rng, model, lens, device, tally)
    rule = draw.draw_rule(rng, model.chunked, len(lens))
    planned = run_plan_decode(world, rule)
    want = oracle.expect_plan(lens, rule)
    assert planned.records() == want.records
    assert planned.work.indptr.tolist() == [*want.indptr, GARBAGE]
    assert planned.work.sizes.tolist() == want.sizes
    assert planned.seq_lens.tolist() == [*lens, GARBAGE]
    for b, n in enumerate(lens):
        pages = -(-n // world.layout.page_size)
        assert planned.page_table[b, :pages].equal(world.page_table[b, :pages])
        assert (planned.page_table[b, pages:] == GARBAGE).all()
    return tally


def _attended(call: DecodeCall, kernel: Callable[[DecodeCall], None]) -> torch.Tensor:
    kernel(call)
    merge(call)
    assert call.partial.failures.item() == 0
    return call.out.clone()


def check_decode(rng: random.Random, model: Model, limits: Limits, device: torch.device) -> Tally:
    """Every decode kernel that takes the model: values, and what must not change them."""
    lens = [draw.draw_length(rng, limits.tokens) for _ in range(rng.randint(1, limits.batch))]
    q_len = rng.choice((1, 1, 1, 2, 4))  # more than one as speculation verifies them
    lens = [max(n, q_len) if q_len > 1 else n for n in lens]
    tally = Tally(requests=len(lens))
    world = draw.draw_world(rng, model, lens, device, tally)
    layer = draw.draw_layer(rng, model, max(lens), device)
    query = draw.draw_query(rng, model, len(lens) * q_len, device, tally)
    kernels: list[Callable[[DecodeCall], None]] = [decode]
    if config_for(model.layout, model.group, 1, model.dtype, capability_of(device)):
        kernels.append(decode_fast)
    for kernel in kernels:
        _check_decode_kernel(rng, model, world, query, layer, kernel, q_len, tally)
    return tally


def _check_decode_kernel(
    rng: random.Random,
    model: Model,
    world: World,
    query: Query,
    layer: LayerAttention,
    kernel: Callable[[DecodeCall], None],
    q_len: int,
    tally: Tally,
) -> None:
    lens = world.lens
    everyone, q_lens = list(range(len(lens))), [q_len] * len(lens)
    exact = kernel is decode
    rule = draw.draw_rule(rng, model.chunked or not exact, len(lens))

    def run(order: list[int] = everyone) -> torch.Tensor:
        return _attended(make_call(world, query, order, rule, layer, q_len), kernel)

    out = run()
    _compare_rows(world, query, q_lens, out, layer)
    # Batch invariance, as far as the batch is one that the buffers hold.
    if sum(-(-n // rule.min_tokens) for n in lens) <= rule.most_items:
        some = [b for b in everyone if rng.random() < 0.6]
        rng.shuffle(some)
        if some:
            rows = [b * q_len + i for b in some for i in range(q_len)]
            assert_same_bits(run(some), out[rows], "another batch")
    tally.faults += draw.refill_dead(world, rng.choice(draw.GARBAGE))
    again = run()
    # `decode_fast` may leave a split to the exact arithmetic for what it met in dead slots.
    if exact:
        assert_same_bits(again, out, "other garbage")
    _compare_rows(world, query, q_lens, again, layer)
    _check_containment(rng, world, again, run, q_lens, tally)


def check_extend(rng: random.Random, model: Model, limits: Limits, device: torch.device) -> Tally:
    """Extend, and the reference: values, chunks, batches, and what must not change them."""
    lens = [draw.draw_length(rng, limits.tokens) for _ in range(rng.randint(1, limits.batch))]
    q_lens = [rng.choice((n, min(n, 1), rng.randint(0, n))) for n in lens]
    tally = Tally(requests=len(lens))
    world = draw.draw_world(rng, model, lens, device, tally)
    layer = draw.draw_layer(rng, model, max(lens), device)
    if layer.window is None and rng.random() < 0.3:
        layer = replace(layer, causal=False)
    query = draw.draw_query(rng, model, sum(q_lens), device, tally)
    if not sum(q_lens):
        return tally

    out = run_extend(world, query, q_lens, layer=layer)
    _compare_rows(world, query, q_lens, out, layer)
    b = rng.randrange(len(lens))
    end = sum(q_lens[: b + 1])
    if q_lens[b]:
        rows = part(query, end - q_lens[b], end)
        alone = run_extend(world, rows, q_lens[b : b + 1], order=[b], layer=layer)
        assert_same_bits(alone, out[end - q_lens[b] : end], "another batch")
        first = rng.randrange(q_lens[b])
        count = rng.randint(1, q_lens[b] - first)
        if layer.causal:
            rows = part(query, end - q_lens[b] + first, end - q_lens[b] + first + count)
            seq_lens = [lens[b] - q_lens[b] + first + count]
            chunk = run_extend(world, rows, [count], order=[b], seq_lens=seq_lens, layer=layer)
            start = end - q_lens[b] + first
            assert_same_bits(chunk, out[start : start + count], "another chunk")
    tally.faults += draw.refill_dead(world, rng.choice(draw.GARBAGE))
    again = run_extend(world, query, q_lens, layer=layer)
    assert_same_bits(again, out, "other garbage")
    _check_containment(
        rng,
        world,
        again,
        lambda: run_extend(world, query, q_lens, layer=layer),
        q_lens,
        tally,
    )
    if rng.random() < 0.5:
        want = _reference_rows(world, query, q_lens, layer)
        _compare_rows(world, query, q_lens, want, layer)
    return tally


def _reference_rows(
    world: World, query: Query, q_lens: list[int], layer: LayerAttention
) -> torch.Tensor:
    out = world.empty_out(query.data.shape[0])
    indptr = torch.tensor([0, *q_lens]).cumsum(0)
    return attend(
        query, world.cache, world.page_table, world.seq_lens, indptr, layer=layer, out=out
    )


def _compare_rows(
    world: World, query: Query, q_lens: list[int], out: torch.Tensor, layer: LayerAttention
) -> None:
    q = query.dequantize()
    end = 0
    for b, n in enumerate(q_lens):
        end += n
        if n:
            some = torch.arange(n)
            if n > MOST_ROWS:
                some = torch.cat([some[:2], some[-2:], torch.randint(0, n, (MOST_ROWS - 4,))])
            rows = some.to(q.device) + (end - n)
            want = oracle.expect(world, b, q[rows], some + world.lens[b] - n, layer)
            wrong = oracle.faults_of(out[rows], want)
            assert not wrong, f"request {b} of lengths {world.lens}: {wrong}"


def _poison(cache: LayerCache, world: World, slot: int, head: int, side: str) -> None:
    """NaN for one token and head, as the format says it."""
    data = cache.k_data if side == "k" else cache.v_data
    geometry = world.layout.k if side == "k" else world.layout.v
    if data.dtype == torch.bfloat16:
        data[slot, head] = torch.nan
        return
    scale = cache.k_scale if side == "k" else cache.v_scale
    assert scale is not None
    where = world.layout.scale_offsets(geometry, torch.tensor([slot], device=scale.device))
    scale.view(-1)[where[0, head]] = 0x7F if geometry.format.name == "nvfp4" else 0xFF


def _check_containment(
    rng: random.Random,
    world: World,
    clean: torch.Tensor,
    run: Callable[[], torch.Tensor],
    q_lens: list[int],
    tally: Tally,
) -> None:
    """A token that is NaN changes no bit of other requests and of other heads."""
    victims = [b for b, n in enumerate(world.lens) if n]
    if not victims:
        return
    victim = rng.choice(victims)
    head = rng.randrange(world.layout.num_kv_heads)
    slot = int(slots_of(world, victim)[rng.randrange(world.lens[victim])])
    _poison(world.cache, world, slot, head, rng.choice("kv"))
    tally.faults += 1
    out = run()
    rows = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    end = sum(q_lens[: victim + 1])
    rows[end - q_lens[victim] : end] = True
    assert_same_bits(out[~rows], clean[~rows], "requests beside one with a NaN")
    heads = torch.zeros(world.num_q_heads, dtype=torch.bool, device=out.device)
    heads[head * world.group : (head + 1) * world.group] = True
    assert_same_bits(out[rows][:, ~heads], clean[rows][:, ~heads], "heads beside one with a NaN")


PROPERTIES: dict[str, Property] = {
    "store": check_store,
    "plan": check_plan,
    "decode": check_decode,
    "extend": check_extend,
}
