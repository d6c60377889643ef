"""Dequantized rows against plain torch."""

from __future__ import annotations

import pytest
import torch

from inkling_backend import reference
from inkling_backend.errors import InvalidTensorError, UnknownNameError
from inkling_backend.kernels.gather import gather
from tests.kernels.helpers import (
    FORMAT_NAMES,
    assert_same_bits,
    clone_cache,
    make_cache,
    make_layout,
    special_rows,
)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_equals_reference(name: str, dtype: torch.dtype, side: str, device: torch.device) -> None:
    layout = make_layout(name, "mxfp8" if name == "nvfp4" else "nvfp4", 2, 96, 64)
    cache = make_cache(layout, 3, device)
    on_cpu = clone_cache(cache, torch.device("cpu"))
    k, v = (special_rows(6, 2, dim, torch.bfloat16) for dim in (96, 64))
    slots = torch.tensor([5, 31, 32, 63, 64, 95])
    reference.store(k, v, slots, on_cpu)
    cache = clone_cache(on_cpu, device)
    slots = torch.tensor([95, 5, 63, 64, 5, 7], dtype=torch.int32)
    got = gather(slots.to(device), cache, side, dtype)
    assert_same_bits(got, reference.gather(slots, on_cpu, side, dtype), side)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_slots_that_hold_nothing_give_zeros(name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 2, 64), 2, device, k_global=float("nan"))
    for buffer in (cache.k_data, cache.k_scale):
        if buffer is not None:
            buffer.fill_(0xFF) if buffer.dtype == torch.uint8 else buffer.fill_(float("nan"))
    got = gather(torch.tensor([0, -1, -(2**40), 64, 2**40]).to(device), cache, "k", torch.float32)
    assert_same_bits(got, torch.zeros(5, 2, 64), "rows")
    assert gather(torch.tensor([3]).to(device), cache, "k").isnan().all()


def test_no_slots(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "mxfp8", 2, 64), 1, device)
    got = gather(torch.empty(0, dtype=torch.int32, device=device), cache, "v")
    assert got.shape == (0, 2, 64)


def test_wrong_arguments(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "mxfp8", 1, 64), 1, device)
    slots = torch.arange(4, device=device)
    with pytest.raises(UnknownNameError, match="unknown side 'q'; known: k, v"):
        gather(slots, cache, "q")
    with pytest.raises(InvalidTensorError, match="the result: expected dtype"):
        gather(slots, cache, "k", torch.float64)
    with pytest.raises(InvalidTensorError, match="slots: expected dtype"):
        gather(slots.float(), cache, "k")
    with pytest.raises(InvalidTensorError, match=r"slots: expected shape \(any\)"):
        gather(slots[None], cache, "k")
