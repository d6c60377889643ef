"""From plan to output through the runner, with both implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_backend.attention import AttentionRunner, LayerAttention
from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import Query
from inkling_backend.kernels.configs import chunked_split_rule, split_rule
from inkling_backend.reference.gather import gather
from tests.attention.world import PLAIN, World, assert_as_accurate, make_world, slots_of

LENS = [70, 0, 300, 1]
Q_LENS = [20, 0, 65, 1]

pytestmark = pytest.mark.usefixtures("triton_extends")


def extend_plan(world: World, runner: AttentionRunner, q_lens: list[int]):  # type: ignore[no-untyped-def]
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).to(world.device)
    return runner.plan_extend(
        world.slot_table, world.rows, world.seq_lens, qo_indptr, q_lens, world.lens
    )


def decoder_layer(device: torch.device) -> LayerAttention:
    """Everything that a decoder layer with four query heads may ask for."""
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.bfloat16, device=device)
    return LayerAttention(0.2, window=40, softcap=2.0, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_layers_with_features(
    implementation: str, causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    world = make_world(LENS, device, k="nvfp4", v="mxfp8", k_dim=96, v_dim=64, dtype=dtype)
    runner, query = world.runner(), world.queries(86)
    layer = decoder_layer(device)
    layer = layer if causal else replace(layer, causal=False, window=None)
    plan = extend_plan(world, runner, Q_LENS)
    out = runner.run(plan, query, world.cache, world.empty_out(86), layer)
    end = 0
    for b, n in enumerate(Q_LENS):
        end += n
        if n:
            rows = query.dequantize()[end - n : end]
            assert_as_accurate(out[end - n : end], world, b, rows, layer)
    decode = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 4)
    query = world.queries(4)
    out = runner.run(decode, query, world.cache, world.empty_out(4), layer)
    for b in range(4):
        assert_as_accurate(out[b : b + 1], world, b, query.dequantize()[b : b + 1], layer)


@pytest.mark.parametrize("quantize_query", [False, True])
def test_prefill_then_decode(
    implementation: str, quantize_query: bool, device: torch.device
) -> None:
    world = make_world(LENS, device, k="mxfp8", v="nvfp4")
    runner = world.runner(quantize_query=quantize_query)
    assert runner.implementation == implementation
    k = torch.randn(86, 2, 64, dtype=world.dtype, device=device)
    v = torch.randn(86, 2, 64, dtype=world.dtype, device=device)
    q = torch.randn(86, 4, 64, dtype=world.dtype, device=device)
    slots = torch.cat(
        [slots_of(world, b)[len(slots_of(world, b)) - n :] for b, n in enumerate(Q_LENS)]
    )
    query = runner.store(world.cache, k, v, slots, q)
    assert (query.scale is not None) == quantize_query
    plan = extend_plan(world, runner, Q_LENS)
    out = runner.run(plan, query, world.cache, world.empty_out(86), PLAIN)
    end = 0
    for b, n in enumerate(Q_LENS):
        end += n
        if n:
            rows = query.dequantize()[end - n : end]
            assert_as_accurate(out[end - n : end], world, b, rows)

    query = runner.store(
        world.cache, k[:4], v[:4], torch.zeros(4, dtype=torch.int64, device=device), q[:4]
    )
    decode = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 4)
    flat = torch.full((4, 4 * 64), torch.nan, dtype=world.dtype, device=device)
    assert runner.run(decode, query, world.cache, flat, PLAIN) is flat
    for b in range(4):
        rows = query.dequantize()[b : b + 1]
        assert_as_accurate(flat[b].view(1, 4, 64), world, b, rows)
    assert (flat[1] == 0).all()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "kvfp4", "mxfp4"])
def test_a_model_with_odd_head_counts(
    recipe: str, implementation: str, device: torch.device
) -> None:
    # Nine query and three KV heads, rows of a fused projection, pages of the default size.
    lens, heads, dim = [37, 130], 3, 64
    world = make_world(lens, device, k=recipe, kv_heads=heads, group=3, page=128)
    runner = world.runner(quantize_query=recipe == "mxfp8")
    total = sum(lens)
    fused = torch.randn(total, 5 * heads * dim, dtype=world.dtype, device=device)
    sizes = (3 * heads * dim, heads * dim, heads * dim)
    q, k, v = (part.view(total, -1, dim) for part in fused.split(sizes, dim=1))
    slots = torch.cat([slots_of(world, b) for b in range(len(lens))])
    query = runner.store(world.cache, k, v, slots, q)
    if query.scale is None:
        assert query.data.data_ptr() == fused.data_ptr(), "the query was copied"
    for side, rows in (("k", k), ("v", v)):
        stored = gather(slots, world.cache, side, torch.float32)
        assert (stored - rows.float()).norm() < 0.2 * rows.float().norm()
    out = runner.run(
        extend_plan(world, runner, lens), query, world.cache, world.empty_out(total), PLAIN
    )
    for b, (start, stop) in enumerate(((0, 37), (37, total))):
        rows = query.dequantize()[start:stop]
        assert_as_accurate(out[start:stop], world, b, rows)
    last = Query(*(None if x is None else x[36::130] for x in query))
    if query.scale is not None:
        last = Query(*(x.contiguous() for x in last if x is not None))
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
    out = runner.run(plan, last, world.cache, world.empty_out(2), PLAIN)
    for b in range(2):
        assert_as_accurate(out[b : b + 1], world, b, last.dequantize()[b : b + 1])


def test_a_query_whose_heads_are_apart_is_refused(
    implementation: str, device: torch.device
) -> None:
    world = make_world([5], device)
    runner = world.runner()
    q = torch.randn(1, 64, 4, dtype=world.dtype, device=device).transpose(1, 2)
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 1)
    with pytest.raises(InvalidTensorError, match="dense rows of shape"):
        runner.run(plan, Query(q), world.cache, world.empty_out(1), PLAIN)


def test_store_without_query(implementation: str, device: torch.device) -> None:
    world = make_world([1], device, k="mxfp8")
    before = world.cache.k_data.clone()
    rows = torch.randn(1, 2, 64, dtype=world.dtype, device=device)
    assert world.runner().store(world.cache, rows, rows, slots_of(world, 0)) is None
    assert not torch.equal(world.cache.k_data, before)


def test_nothing_to_do(implementation: str, device: torch.device) -> None:
    world = make_world([], device)
    runner = world.runner()
    query, out = world.queries(0), world.empty_out(0)
    for plan in (
        runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 0),
        extend_plan(world, runner, []),
    ):
        assert runner.run(plan, query, world.cache, out, PLAIN) is out


def test_requests_without_new_tokens(implementation: str, device: torch.device) -> None:
    world = make_world([5, 6], device)
    runner = world.runner()
    plan = extend_plan(world, runner, [0, 0])
    assert runner.run(plan, world.queries(0), world.cache, world.empty_out(0), PLAIN).shape[0] == 0


def test_a_decode_plan_survives_an_extend(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world([70, 130], device)
    other = make_world([300, 20], device)
    runner, query = world.runner(), world.queries(2)
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
    first = runner.run(plan, query, world.cache, world.empty_out(2), PLAIN)
    extended = extend_plan(other, runner, [30, 20])
    runner.run(extended, other.queries(50), other.cache, other.empty_out(50), PLAIN)
    second = runner.run(plan, query, world.cache, world.empty_out(2), PLAIN)
    assert torch.equal(first, second)


def test_buffers_stay_where_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world([70, 130], device)
    runner = world.runner()

    def addresses() -> list[int]:
        decode = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
        extend = extend_plan(world, runner, [1, 1])
        assert decode.work is not None
        tensors = [decode.page_table, decode.seq_lens, *decode.work]
        tensors += [extend.page_table, extend.seq_lens, extend.qo_indptr]
        return [t.data_ptr() for t in tensors]

    before = addresses()
    assert addresses() == before
    assert len(set(before)) == len(before)


def test_workspace_is_counted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world([70] * 8, device, max_context=1024)
    # 19 pages of 64 tokens hold more than max_context.
    batch, pages = 16, 16
    runner = world.runner(max_batch=batch)
    fast = "decode_fast" in runner.kernels
    rule = split_rule(4, world.layout, batch, 1024)
    if fast:
        rule = chunked_split_rule(4, world.layout, batch, 1024, programs=1000)
    items = rule.most_items
    ints = 2 * batch * pages + 2 * batch + 2 * (batch + 1) + 4 * items + 3
    assert runner.workspace_bytes == 4 * ints + items * 4 * (64 + 2) * 4
    monkeypatch.setenv("INKLING_KERNELS", "reference")
    assert world.runner().workspace_bytes == 0


def test_the_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = make_world([], torch.device("cpu"))
    monkeypatch.delenv("INKLING_KERNELS", raising=False)
    assert cpu.runner().implementation == "reference"


def test_wrong_calls_are_named(implementation: str, device: torch.device) -> None:
    world = make_world([70], device)
    runner = world.runner(max_batch=2)
    table, rows, lens = world.slot_table, world.rows, world.seq_lens
    plan = runner.plan_decode(table, rows, lens, 1)
    query, out = world.queries(1), world.empty_out(1)
    indptr = torch.tensor([0, 1], device=device)
    over_tree = runner.plan_decode(table, rows, lens, 1, tree=torch.ones_like(lens)[:, None].long())
    of_another_model = replace(PLAIN, sinks=torch.zeros(3))
    wrong = [
        ("rows", lambda: runner.plan_decode(table, rows, lens, 3)),
        ("rows", lambda: runner.plan_decode(table, rows, lens, 2)),
        ("rows", lambda: runner.plan_decode(table, rows.float(), lens, 1)),
        ("tree", lambda: runner.plan_decode(table, rows, lens, 1, tree=lens[None].repeat(1, 2))),
        ("tree", lambda: runner.plan_decode(table, rows, lens, 1, tree=lens[None].int())),
        ("layer", lambda: runner.run(over_tree, query, world.cache, out, replace(PLAIN, window=8))),
        ("slot_table", lambda: runner.plan_decode(table.long(), rows, lens, 1)),
        ("slot_table", lambda: runner.plan_decode(table[:, :64], rows, lens, 1)),
        ("qo_indptr", lambda: runner.plan_extend(table, rows, lens, lens, [1], [1])),
        ("q_lens", lambda: runner.plan_extend(table, rows, lens, indptr, [], [70])),
        ("kv_lens", lambda: runner.plan_extend(table, rows, lens, indptr, [1], [])),
        ("query", lambda: runner.run(plan, world.queries(2), world.cache, out, PLAIN)),
        ("query", lambda: runner.run(plan, Query(query.data.float()), world.cache, out, PLAIN)),
        ("out", lambda: runner.run(plan, query, world.cache, world.empty_out(2), PLAIN)),
        ("out", lambda: runner.run(plan, query, world.cache, out.float(), PLAIN)),
        ("sinks", lambda: runner.run(plan, query, world.cache, out, of_another_model)),
    ]
    for name, call in wrong:
        with pytest.raises(InvalidTensorError, match=f"^{name}:"):
            call()


@pytest.mark.parametrize("tree", [None, [0b1, 0b11, 0b101]])
def test_several_tokens(tree: list[int] | None, implementation: str, device: torch.device) -> None:
    """A chain, or what words say, which may change in place."""
    world = make_world([70, 9], device, k="mxfp8")
    runner, query, out = world.runner(max_q_len=3), world.queries(6), world.empty_out(6)
    words = None if tree is None else torch.tensor([tree, [0b1, 0b11, 0b111]], device=device)
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 2, 3, tree=words)
    for _ in range(2):
        runner.run(plan, query, world.cache, out, PLAIN)
        for b in range(2):
            rows = slice(3 * b, 3 * b + 3)
            row = None if words is None else words[b]
            assert_as_accurate(out[rows], world, b, query.dequantize()[rows], tree=row)
        if words is not None:
            words.copy_(words.flip(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs exist on a GPU only")
@pytest.mark.parametrize("features", [False, True])
def test_a_captured_graph_replays_other_batches(features: bool) -> None:
    device = torch.device("cuda")
    layer = decoder_layer(device) if features else PLAIN
    world = make_world([70, 300, 1, 0], device, k="mxfp8", v="nvfp4")
    runner, query = world.runner(), world.queries(4)
    lens, out = world.seq_lens, world.empty_out(4)

    def step(into: torch.Tensor) -> None:
        plan = runner.plan_decode(world.slot_table, world.rows, lens, 4)
        runner.run(plan, query, world.cache, into, layer)

    step(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(out)
    for shorter in (0, 1, 69):
        lens.copy_((world.seq_lens - shorter).clamp(min=0))
        out.fill_(torch.nan)
        graph.replay()
        eager = world.empty_out(4)
        step(eager)
        assert torch.equal(out, eager)
