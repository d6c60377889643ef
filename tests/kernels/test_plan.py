"""Page tables, work lists and the rule that cuts requests."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels import configs
from inkling_backend.kernels.configs import KernelConfig, SplitRule, chunked_split_rule, split_rule
from inkling_backend.kernels.plan import WorkList, plan_decode, plan_extend
from tests.attention.world import World, make_world

GARBAGE = -7


RULE = SplitRule(64, 512, 4, 64, most_items=100)
CHUNKED = SplitRule(512, 512, 1, 256, most_items=100, most_chunks=8, programs=1 << 20)


class Planned(NamedTuple):
    """What `plan_decode` filled; ``work`` with garbage behind its end."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    work: WorkList

    def records(self) -> list[list[int]]:
        """The work items, up to the garbage."""
        records = [record for record in self.work.records.tolist() if record[0] != GARBAGE]
        assert len(records) == self.work.sizes[0]
        return records


def run_plan_decode(world: World, rule: SplitRule, *, order: list[int] | None = None) -> Planned:
    """Plans the world's requests (or some, in another order) into buffers full of garbage."""
    chosen = torch.tensor(order if order is not None else range(len(world.lens)), dtype=torch.int64)
    chosen = chosen.to(world.device)
    batch = len(chosen)

    def garbage(*shape: int) -> torch.Tensor:
        return torch.full(shape, GARBAGE, dtype=torch.int32, device=world.device)

    work = WorkList(garbage(batch + 2), garbage(2), garbage(rule.most_items + 1, 4))
    planned = Planned(
        garbage(batch + 1, -(-world.max_context // world.layout.page_size)),
        garbage(batch + 1),
        work,
    )
    plan_decode(
        world.slot_table,
        world.rows[chosen],
        world.seq_lens[chosen],
        batch=batch,
        page_size=world.layout.page_size,
        max_context=world.max_context,
        rule=rule,
        page_table=planned.page_table,
        seq_lens_out=planned.seq_lens,
        work=work,
    )
    return planned


@pytest.mark.parametrize("page", [32, 64, 128])
def test_decode_plan_lists_every_split_once(page: int, device: torch.device) -> None:
    rule = RULE
    lens = [0, 1, 64, 65, 0, 256, 257, 700]
    world = make_world(lens, device, page=page)
    got = run_plan_decode(world, rule)
    expected_work = [
        [b, start, min(start + rule.split_tokens(n), n), n <= rule.split_tokens(n)]
        for b, n in enumerate(lens)
        for start in range(0, n, rule.split_tokens(n))
    ]
    firsts = [sum(w[0] < b for w in expected_work) for b in range(len(lens) + 1)]
    assert got.work.indptr.tolist() == [*firsts, GARBAGE]
    assert got.work.sizes.tolist() == [len(expected_work), 1]
    assert got.records() == expected_work
    assert got.seq_lens.tolist() == [*lens, GARBAGE]
    for b, n in enumerate(lens):
        pages = -(-n // page)
        assert got.page_table[b, :pages].equal(world.page_table[b, :pages])
        assert (got.page_table[b, pages:] == GARBAGE).all()
    assert (got.page_table[len(lens)] == GARBAGE).all()


def test_a_small_batch_has_chunks_as_work_items(device: torch.device) -> None:
    lens = [600, 0, 256, 900]  # 3 + 0 + 1 + 4 chunks
    small = run_plan_decode(make_world(lens, device), CHUNKED)
    assert small.records() == [
        [b, start, min(start + 256, n), n == 256]
        for b, n in enumerate(lens)
        for start in range(0, n, 256)
    ]
    assert small.work.indptr.tolist() == [0, 3, 3, 4, 8, GARBAGE]
    assert small.work.sizes.tolist() == [8, 2]
    large = run_plan_decode(make_world([*lens, 1], device), CHUNKED)
    assert large.records() == [
        *([0, 0, 512, 0], [0, 512, 600, 0], [2, 0, 256, 1]),
        *([3, 0, 512, 0], [3, 512, 900, 0], [4, 0, 1, 1]),
    ]
    assert large.work.indptr.tolist() == [0, 2, 2, 3, 5, 6, GARBAGE]
    assert large.work.sizes.tolist() == [6, 1]


@pytest.mark.parametrize(
    ("programs", "chunked"),
    [
        (1 << 20, True),  # a round of 136 + 96 beside one of 1024 + 96, neither of them full
        (64, True),  # two of 136 + 96 beside one, not full, of 682 + 96
        (16, False),  # eight of 136 + 96 beside one of 1024 + 96
        (1, False),
    ],
)
def test_work_items_are_what_fills_the_programs(
    programs: int, chunked: bool, device: torch.device
) -> None:
    rule = SplitRule(1024, 1024, 1, 128, 100, 100, heads=2, programs=programs)
    work = run_plan_decode(make_world([8192], device, max_context=8192), rule).work
    assert work.sizes.tolist() == ([64, 8] if chunked else [8, 1])


@pytest.mark.parametrize("most_items", [5, 7, 11, 15])
def test_splits_double_until_they_fit(most_items: int, device: torch.device) -> None:
    rule = SplitRule(64, 64, 1, 64, most_items)
    lens = [600, 1, 130, 64]  # 10 + 1 + 3 + 1 splits of 64 tokens
    tokens = next(64 << i for i in range(9) if sum(-(-n // (64 << i)) for n in lens) <= most_items)
    got = run_plan_decode(make_world(lens, device), rule)
    assert [record[:3] for record in got.records()] == [
        [b, start, min(start + tokens, n)]
        for b, n in enumerate(lens)
        for start in range(0, n, tokens)
    ]


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
    rule = RULE
    world = make_world([10], device, max_context=128)
    world.slot_table[0, 0] = -1
    world.slot_table[3] = torch.arange(128)
    world.rows = torch.tensor([0, 3, 3], device=device)
    world.lens = [1, 5000, -3]
    got = run_plan_decode(world, rule)
    assert got.seq_lens[:3].tolist() == [1, 128, 0]
    assert got.page_table[:3].tolist() == [[0, GARBAGE], [0, 1], [GARBAGE, GARBAGE]]
    assert got.work.indptr[:4].tolist() == [0, 1, 3, 3]


def test_kernel_and_host_cut_alike(device: torch.device) -> None:
    rule = SplitRule(256, 1024, 16, 64, most_items=10_000)
    edges = [256 * i + j for i in (1, 2, 31, 32, 33, 64, 100, 2000) for j in (-1, 0, 1)]
    lens = sorted({1, 63, 64, 65, 131072, *edges, *torch.randint(1, 131072, (30,)).tolist()})
    world = make_world([1], device, max_context=131072)
    world.rows = torch.zeros(len(lens), dtype=torch.int64, device=device)
    world.lens = lens
    indptr = run_plan_decode(world, rule).work.indptr.cpu()
    assert indptr[: len(lens) + 1].diff().tolist() == [rule.splits(min(n, 131072)) for n in lens]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_buffers_have_room(batch: int, chunked: bool) -> None:
    bf16 = get_format("bf16")
    layout = CacheLayout(bf16, bf16, 8, 128, 128)
    for context in (1, 255, 256, 257, 8192, 8193, 100_000):
        rule = split_rule(32, layout, batch, context)
        if chunked:
            config = KernelConfig(8, 64, 1, 5, programs_per_sm=12)
            rule = chunked_split_rule(32, layout, batch, context, config, programs=1584)
        held = rule.most_items * configs.partial_bytes(32, layout)
        assert held <= configs.PARTIAL_BYTES or rule.most_items == batch
        assert rule.most_items >= max(batch, rule.most_chunks)
        # A batch of the longest requests is cut as each of them is alone, where memory allows it.
        lens = {1, context, *range(max(1, context - 3000), context, 7)}
        most = batch * max(map(rule.splits, lens))
        assert rule.most_items >= most or held + configs.partial_bytes(32, layout) * batch > (
            configs.PARTIAL_BYTES
        )
        for length in lens:
            assert rule.split_tokens(length) % max(rule.step, configs.SPLIT_STEP) == 0


def test_empty_batch(device: torch.device) -> None:
    work = run_plan_decode(make_world([], device), RULE).work
    assert work.indptr[0] == 0
    assert work.sizes[0] == 0
