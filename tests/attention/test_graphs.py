"""A captured decode step sees what changes between its replays.

Where there is no GPU a replay is the same step once more, on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inkling_backend.attention import AttentionRunner
from inkling_backend.formats.layout import LayerCache
from tests.attention.world import PLAIN, World, make_world, slots_of
from tests.kernels.helpers import assert_same_cache, clone_cache

BATCH = 8
# The interpreter is slow, and knows no graphs.
PAIRS = [("mxfp8", "nvfp4")]
if torch.cuda.is_available():
    PAIRS += [
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("kvfp4", "kvfp4"),
        ("mxfp4", "mxfp4"),
        ("bf16", "bf16"),
    ]
LENS = [70, 129, 1, 150, 64]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")


class Captured:
    """One decode step of up to `BATCH` requests: plan, store and attention, captured once.

    All inputs are the graph's own buffers, as the engine has them: rows of the slot table, lengths,
    slots of the new tokens, Q, K and V. At capture every request is a dummy: row 0, one token, slot
    0.
    """

    def __init__(self, world: World, runner: AttentionRunner, quantized: bool) -> None:
        device, heads, dim = world.device, world.layout.num_kv_heads, world.layout.k_head_dim
        self.world, self.runner, self.quantized = world, runner, quantized
        self.rows = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.lens = torch.ones(BATCH, dtype=torch.int64, device=device)
        self.slots = torch.zeros(BATCH, dtype=torch.int64, device=device)

        def normal(count: int) -> torch.Tensor:
            return torch.randn(BATCH, count, dim).to(world.dtype).to(device)

        self.q, self.k, self.v = normal(world.num_q_heads), normal(heads), normal(heads)
        self.out = world.empty_out(BATCH)
        self.step(self.out, BATCH)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.step(self.out, BATCH)

    def step(self, out: torch.Tensor, batch: int) -> None:
        world, runner = self.world, self.runner
        plan = runner.plan_decode(world.slot_table, self.rows, self.lens, batch)
        query = runner.store(
            world.cache, self.k[:batch], self.v[:batch], self.slots[:batch], self.q[:batch]
        )
        runner.run(plan, query, world.cache, out, PLAIN)

    def load(self, count: int) -> None:
        """The first requests of the world become the batch; the rest is padding."""
        self.rows.zero_()
        self.lens.fill_(1)
        self.slots.zero_()
        self.rows[:count] = self.world.rows[:count]
        self.lens[:count] = self.world.seq_lens[:count]
        self.slots[:count] = torch.stack([slots_of(self.world, b)[-1] for b in range(count)])

    def replay(self) -> torch.Tensor:
        self.out.fill_(torch.nan)
        if self._graph is None:
            self.step(self.out, BATCH)
        else:
            self._graph.replay()
        return self.out

    def eager(self, count: int) -> torch.Tensor:
        """The same requests alone, without a graph and without padding."""
        out = self.world.empty_out(count)
        self.step(out, count)
        return out


@pytest.fixture(params=PAIRS, ids="-".join)
def captured(request: pytest.FixtureRequest, device: torch.device) -> Captured:
    k, v = request.param
    world = make_world(LENS, device, k=k, v=v)
    world.slot_table[0, : world.layout.page_size] = torch.arange(
        world.layout.page_size, device=device
    )
    # Page 0 as the pool makes it: a padded row reads it.
    zeros(world.cache)
    runner = world.runner(max_batch=BATCH, quantize_query=k == "mxfp8")
    return Captured(world, runner, k == "mxfp8")


def zeros(cache: LayerCache) -> None:
    page = cache.layout.page_size
    for data, scale, side in (
        (cache.k_data, cache.k_scale, cache.layout.k),
        (cache.v_data, cache.v_scale, cache.layout.v),
    ):
        data[:page] = 0
        if scale is not None:
            scale[0] = side.format.one_scale


def test_dummies_of_the_capture_write_nothing(device: torch.device) -> None:
    world = make_world([70, 129], device, k="mxfp8")
    zeros(world.cache)
    before = clone_cache(world.cache)
    captured = Captured(world, world.runner(max_batch=BATCH, quantize_query=True), True)
    captured.replay()
    assert_same_cache(world.cache, before)


def test_a_batch_padded_to_the_captured_size(captured: Captured) -> None:
    page_0 = clone_cache(captured.world.cache)
    page = captured.world.layout.page_size
    for count in (5, 1, 3):
        captured.load(count)
        assert torch.equal(captured.replay()[:count], captured.eager(count)), count
    for name in ("k_data", "v_data"):
        got, want = getattr(captured.world.cache, name), getattr(page_0, name)
        assert torch.equal(got[:page].view(torch.uint8), want[:page].view(torch.uint8))


def test_pages_that_now_hold_another_request(captured: Captured) -> None:
    captured.load(5)
    first = captured.replay().clone()
    world = captured.world
    # The request's pages, last first, hold other tokens and another length now.
    page = world.layout.page_size
    table = world.slot_table[world.rows[3]]
    pages = table[: LENS[3] : page].flip(0) // page
    slots = pages[:, None] * page + torch.arange(page, device=world.device)
    table[: slots.numel()] = slots.flatten().to(torch.int32)
    world.lens[3] = 175
    k, v = (torch.randn(175, 2, 64).to(world.dtype).to(world.device) for _ in "kv")
    captured.runner.store(world.cache, k, v, slots_of(world, 3))
    captured.load(5)
    again = captured.replay()
    assert torch.equal(again[:5], captured.eager(5))
    assert not torch.equal(again[3], first[3])
    assert torch.equal(again[:3], first[:3])


def test_scales_that_change_in_place(device: torch.device) -> None:
    world = make_world([70, 129], device, k="nvfp4")
    zeros(world.cache)
    captured = Captured(world, world.runner(max_batch=BATCH), False)
    captured.load(2)
    captured.slots.zero_()  # what is stored already keeps its codes
    first = captured.replay().clone()
    scales: dict[str, tuple[torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor] | None]]
    scales = {"v": (world.cache.v_global, lambda x: x * 2), "k": (world.cache.k_global, None)}
    for scale, becomes in scales.values():
        assert scale is not None
        scale.mul_(2)
        again = captured.replay()[:2].clone()
        assert torch.equal(again, captured.eager(2))
        assert not torch.equal(again, first[:2])
        if becomes is not None:
            assert torch.equal(again, becomes(first[:2]))
        scale.mul_(0.5)
    assert torch.equal(captured.replay()[:2], first[:2])


def test_a_query_is_the_graphs_own(captured: Captured) -> None:
    captured.load(5)
    first = captured.replay()[:5].clone()
    captured.q.neg_()
    again = captured.replay()[:5].clone()
    assert torch.equal(again, captured.eager(5))
    assert not torch.equal(again, first)
