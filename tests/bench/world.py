"""A tiny benchmark on the CPU: the reference path, and a meter that replays by calling."""

from __future__ import annotations

import torch

from inkling_backend.bench.cases import Heads
from inkling_backend.bench.data import Lab
from inkling_backend.bench.results import Row
from inkling_backend.bench.timing import Launch, Replay, Timing

HEADS = Heads(q_heads=4, kv_heads=2, head_dim=32, page_size=32)


class FakeMeter:
    """Replays by calling again; every call takes 10 us, and 11 sustained."""

    def __init__(self) -> None:
        self.timed = 0

    def capture(self, launch: Launch, calls: int) -> Replay:
        def replay() -> None:
            for i in range(calls):
                launch(i)

        replay()
        return replay

    def time(self, replay: Replay, calls: int, *, sustained: bool = False) -> Timing:
        replay()
        self.timed += 1
        return Timing(10.0, 11.0 if sustained else None)


def make_lab(device: torch.device) -> Lab:
    return Lab(HEADS, device, rotate_bytes=1 << 16, max_batch=4, max_context=1024)


def make_row(**changes: object) -> Row:
    row: Row = {
        "op": "decode",
        "format": "mxfp8",
        "batch": 64,
        "context": 8192,
        "q_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "page_size": 128,
        "bytes": 1_108_000_000,
        "gate": "pass",
        "us": 300.0,
        "us_sustained": 310.0,
        "copy_us": 260.0,
        "peers": {"flashinfer_bf16": 496.0, "fa3_bf16": 532.0, "fa3_fp8": 200.0},
    }
    return {key: value for key, value in (row | changes).items() if value is not None}
