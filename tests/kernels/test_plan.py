"""Page tables, work lists and the rule that cuts requests."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels import configs
from inkling_backend.kernels.configs import SplitRule, split_rule
from inkling_backend.kernels.plan import plan_decode, plan_extend
from tests.attention.world import World, make_world

GARBAGE = -7


def decode_buffers(world: World, rule: SplitRule, batch: int) -> dict[str, torch.Tensor]:
    """Output buffers of `plan_decode`, full of garbage."""
    shapes = {
        "page_table": (batch + 1, -(-world.max_context // world.layout.page_size)),
        "seq_lens_out": (batch + 1,),
        "split_indptr": (batch + 2,),
        "work": (batch * rule.most_splits(world.max_context) + 1, 3),
    }
    return {
        name: torch.full(shape, GARBAGE, dtype=torch.int32, device=world.device)
        for name, shape in shapes.items()
    }


def run_plan_decode(
    world: World, rule: SplitRule, *, order: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """Plans the world's requests (or some, in another order) into fresh buffers."""
    chosen = torch.tensor(order if order is not None else range(len(world.lens)), dtype=torch.int64)
    chosen = chosen.to(world.device)
    buffers = decode_buffers(world, rule, len(chosen))
    plan_decode(
        world.slot_table,
        world.rows[chosen],
        world.seq_lens[chosen],
        batch=len(chosen),
        page_size=world.layout.page_size,
        max_context=world.max_context,
        rule=rule,
        **buffers,
    )
    return buffers


@pytest.mark.parametrize("page", [32, 64, 128])
def test_decode_plan_lists_every_split_once(page: int, device: torch.device) -> None:
    rule = SplitRule(64, 4)
    lens = [0, 1, 64, 65, 0, 256, 257, 700]
    world = make_world(lens, device, page=page)
    got = {name: t.cpu() for name, t in run_plan_decode(world, rule).items()}
    expected_work = [
        [b, start, min(start + rule.split_tokens(n), n)]
        for b, n in enumerate(lens)
        for start in range(0, n, rule.split_tokens(n))
    ]
    firsts = [sum(w[0] < b for w in expected_work) for b in range(len(lens) + 1)]
    assert got["split_indptr"].tolist() == [*firsts, GARBAGE]
    assert got["work"][: len(expected_work)].tolist() == expected_work
    assert (got["work"][len(expected_work) :] == GARBAGE).all()
    assert got["seq_lens_out"].tolist() == [*lens, GARBAGE]
    for b, n in enumerate(lens):
        pages = -(-n // page)
        assert got["page_table"][b, :pages].equal(world.page_table[b, :pages].cpu())
        assert (got["page_table"][b, pages:] == GARBAGE).all()
    assert (got["page_table"][len(lens)] == GARBAGE).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_extend_plan_copies_the_batch(index: torch.dtype, device: torch.device) -> None:
    lens = [5, 130, 64]
    world = make_world(lens, device)
    page_table = torch.full((4, 16), GARBAGE, dtype=torch.int32, device=device)
    seq_lens = torch.full((4,), GARBAGE, dtype=torch.int32, device=device)
    qo_indptr = torch.full((5,), GARBAGE, dtype=torch.int32, device=device)
    plan_extend(
        world.slot_table,
        world.rows.to(index),
        world.seq_lens.to(index),
        torch.tensor([0, 5, 5, 60], dtype=index, device=device),
        batch=3,
        page_size=64,
        max_context=1024,
        page_table=page_table,
        seq_lens_out=seq_lens,
        qo_indptr_out=qo_indptr,
    )
    assert seq_lens.tolist() == [*lens, GARBAGE]
    assert qo_indptr.tolist() == [0, 5, 5, 60, GARBAGE]
    for b, n in enumerate(lens):
        pages = -(-n // 64)
        assert page_table[b, :pages].equal(world.page_table[b, :pages])
        assert (page_table[b, pages:] == GARBAGE).all()


def test_padding_rows_and_lengths_beyond_the_buffers_are_harmless(device: torch.device) -> None:
    rule = SplitRule(64, 4)
    world = make_world([10], device, max_context=128)
    world.slot_table[0, 0] = -1
    world.slot_table[3] = torch.arange(128)
    world.rows = torch.tensor([0, 3, 3], device=device)
    world.lens = [1, 5000, -3]
    got = {name: t.cpu() for name, t in run_plan_decode(world, rule).items()}
    assert got["seq_lens_out"][:3].tolist() == [1, 128, 0]
    assert got["page_table"][:3].tolist() == [[0, GARBAGE], [0, 1], [GARBAGE, GARBAGE]]
    assert got["split_indptr"][:4].tolist() == [0, 1, 3, 3]


def test_kernel_and_host_cut_alike(device: torch.device) -> None:
    rule = SplitRule(256, 128, target=16)
    edges = [256 * i + j for i in (1, 2, 31, 32, 33, 64, 100, 2000) for j in (-1, 0, 1)]
    lens = sorted({1, 63, 64, 65, 131072, *edges, *torch.randint(1, 131072, (30,)).tolist()})
    world = make_world([1], device, max_context=131072)
    world.rows = torch.zeros(len(lens), dtype=torch.int64, device=device)
    world.lens = lens
    indptr = run_plan_decode(world, rule)["split_indptr"].cpu()
    assert indptr[: len(lens) + 1].diff().tolist() == [rule.splits(min(n, 131072)) for n in lens]


@pytest.mark.parametrize(
    "rule",
    [SplitRule(256, 32), SplitRule(256, 8), SplitRule(64, 128), SplitRule(256, 128, target=16)],
)
def test_splits_stay_within_their_bounds(rule: SplitRule) -> None:
    for context in (1, 255, 256, 257, 8192, 8193, 100_000):
        lens = range(1, context + 1) if context <= 8193 else range(context - 5000, context + 1)
        assert max(map(rule.splits, lens)) <= rule.most_splits(context)
    for length in range(1, 20_000, 37):
        tokens = rule.split_tokens(length)
        assert tokens % configs.SPLIT_STEP == 0
        assert (rule.splits(length) - 1) * tokens < length <= rule.splits(length) * tokens


def test_partial_results_are_bounded() -> None:
    bf16 = get_format("bf16")
    layout = CacheLayout(bf16, bf16, 8, 128, 128)
    few, many = split_rule(32, layout, 16), split_rule(32, layout, 4096)
    assert few.max_splits == configs.MOST_SPLITS
    assert many.max_splits == configs.FEWEST_SPLITS
    for batch in (16, 64, 256, 400):
        splits = split_rule(32, layout, batch).max_splits
        held = batch * splits * configs.partial_bytes(32, layout)
        assert held <= configs.PARTIAL_BYTES or splits == configs.FEWEST_SPLITS


def test_empty_batch(device: torch.device) -> None:
    world = make_world([], device)
    assert run_plan_decode(world, SplitRule(64, 4))["split_indptr"][0] == 0
