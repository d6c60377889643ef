"""The meter's arithmetic, on a device whose clock the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inkling_backend.bench.timing import GraphMeter, copy_time
from tests.bench.world import FakeMeter


class Device:
    """A clock in microseconds; an event takes the time at which it is recorded."""

    now = 0.0
    capturing = False

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        device = self

        class Event:
            at = -1.0

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        return Event()

    @contextlib.contextmanager
    def capture(self, graph: object) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", device.capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return device


def replay_taking(clock: Device, *times: float) -> tuple[Callable[[], None], list[float]]:
    """A replay that takes these times in turn; and a list that grows by every one."""
    taken: list[float] = []

    def replay() -> None:
        taken.append(times[len(taken) % len(times)])
        clock.now += taken[-1]

    return replay, taken


def test_every_call_runs_before_it_is_captured(clock: Device) -> None:
    seen: list[tuple[int, bool]] = []
    replay = GraphMeter().capture(lambda i: seen.append((i, clock.capturing)), 3)
    assert seen == [(i, captured) for captured in (False, True) for i in range(3)]
    replay()
    assert len(seen) == 6


def test_the_median_is_of_one_call(clock: Device) -> None:
    replay, taken = replay_taking(clock, 8000.0, 8000.0, 8000.0, 9000.0)
    timing = GraphMeter().time(replay, 4)
    assert timing.us == 2000.0
    assert timing.us_sustained is None
    assert len(taken) == 2 + 150000 // 8000


@pytest.mark.parametrize(("us", "count"), [(1.0, 30), (1e6, 3)])
def test_replays_are_bounded(us: float, count: int, clock: Device) -> None:
    replay, taken = replay_taking(clock, us)
    GraphMeter().time(replay, 1)
    assert len(taken) == 2 + count


def test_sustained_is_the_mean_of_a_while(clock: Device) -> None:
    replay, taken = replay_taking(clock, 10000.0, 10000.0, 10000.0, 20000.0)
    timing = GraphMeter(0.5).time(replay, 2, sustained=True)
    assert timing.us == 5000.0
    assert timing.us_sustained == pytest.approx(6250.0, rel=0.05)
    assert len(taken) == 2 + 15 + 50
    assert GraphMeter(0).time(replay, 2, sustained=True).us_sustained is None


def test_a_copy_moves_as_many_bytes() -> None:
    moved: list[int] = []

    class Meter(FakeMeter):
        def capture(self, launch: Callable[[int], Any], calls: int) -> Callable[[], object]:
            assert calls * num_bytes >= 1 << 20
            moved.extend(2 * launch(i).nbytes for i in range(calls))
            return lambda: None

    num_bytes = 1 << 14
    assert copy_time(Meter(), num_bytes, torch.device("cpu"), 1 << 20) == 10.0
    assert set(moved) == {num_bytes}
