"""Times of captured CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

# Replays whose median is taken: as many as fit into the time, within these bounds.
_MEDIAN_SECONDS = 0.15
_FEWEST, _MOST = 3, 30

Launch = Callable[[int], object]
Replay = Callable[[], object]


class Timing(NamedTuple):
    """Microseconds of one call.

    us: median over replays.
    us_sustained: mean over a second or so of replays back to back, None if it was not asked for.
    """

    us: float
    us_sustained: float | None = None


class Meter(Protocol):
    """Makes a replay of some calls, and times it."""

    def capture(self, launch: Launch, calls: int) -> Replay:
        """Everything that ``launch(0)`` ... ``launch(calls - 1)`` does, as one thing to replay."""
        ...

    def time(self, replay: Replay, calls: int, *, sustained: bool = False) -> Timing:
        """Time of one of the calls in a replay."""
        ...


class GraphMeter:
    """The meter of a GPU: CUDA graphs, timed by events on the device.

    Args:
        sustained_seconds: how long `Timing.us_sustained` is measured; 0 leaves it out.
    """

    def __init__(self, sustained_seconds: float = 1.0) -> None:
        self._sustained_seconds = sustained_seconds

    def capture(self, launch: Launch, calls: int) -> Replay:
        """Runs every call once, so that nothing compiles in the capture, then captures them."""
        for i in range(calls):
            launch(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                launch(i)
        return graph.replay

    def time(self, replay: Replay, calls: int, *, sustained: bool = False) -> Timing:
        """Replays are queued without waiting, so that no gap of the host's is counted."""
        replay()
        (first,) = _between(replay, 1)
        count = max(_FEWEST, min(_MOST, int(_MEDIAN_SECONDS * 1e6 / first)))
        median = statistics.median(_between(replay, count))
        mean = None
        if sustained and self._sustained_seconds > 0:
            count = max(2, int(self._sustained_seconds * 1e6 / median))
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(count):
                replay()
            end.record()
            torch.cuda.synchronize()
            mean = start.elapsed_time(end) * 1e3 / count / calls
        return Timing(median / calls, mean)


def _between(replay: Replay, count: int) -> list[float]:
    """Microseconds of each of ``count`` replays."""
    events = [torch.cuda.Event(True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]


def copy_time(meter: Meter, num_bytes: int, device: torch.device, rotate_bytes: int) -> float:
    """Microseconds of a kernel that reads and writes ``num_bytes`` together, a half each.

    Not a copy, which becomes a memcpy: on an H200 that has 2.7 or 4.1 TB/s, as addresses fall.
    """
    words = max(2, num_bytes // 16)
    calls = min(2048, max(2, -(-rotate_bytes // (16 * words))))
    source = torch.empty(calls, words, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    replay = meter.capture(lambda i: torch.bitwise_not(source[i], out=target[i]), calls)
    return meter.time(replay, calls).us
