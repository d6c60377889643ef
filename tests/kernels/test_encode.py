"""Every 16-bit number, every tie and every scale, through the store into bytes."""

from __future__ import annotations

import pytest
import torch

from inkling_backend import reference
from inkling_backend.kernels.store import store
from tests.kernels.helpers import (
    FOUR_OVER_SIX,
    QUANTIZED_NAMES,
    STORED_NAMES,
    assert_same_cache,
    clone_cache,
    format_of,
    make_cache,
    make_layout,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STORED_NAMES)
def test_every_16_bit_number(name: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype).view(512, 1, 128)
    cache = make_cache(make_layout(name, "bf16", 1, 128, 16, page=128), 5, device)
    unused = torch.zeros(512, 1, 16)
    slots = torch.arange(64, 576)
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, unused, slots, want)
    store(rows.to(device), unused.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)


@pytest.mark.parametrize("name", [*QUANTIZED_NAMES, FOUR_OVER_SIX])
def test_every_rounding_step(name: str, device: torch.device) -> None:
    # With the block's maximum fixed, elements run over every code, every tie and its neighbours.
    block, top = format_of(name).block, 448.0 if name == "mxfp8" else 6.0
    values = representable(name)
    ties = (values[1:] + values[:-1]) / 2
    near = [ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1), values]
    points = torch.cat(near)
    points = torch.cat([points, -points])
    filler = -len(points) % (block - 1)
    points = torch.cat([points, torch.zeros(filler)]).view(-1, block - 1)
    rows = torch.cat([torch.full((len(points), 1), top), points], dim=1)
    cache = make_cache(make_layout(name, name, 1, 2 * block), 4, device, k_global=1.0, v_global=0.5)
    rows = torch.cat([rows, rows], dim=1)[:, None, :]
    slots = torch.arange(1, len(rows) + 1)
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, rows, slots, want)
    store(rows.to(device), rows.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)


# 24-bit significands beside 1, 1.5 and 2, whose quotients come nearest to a tie without being one,
# and small numbers, where remainders underflow.
HARD_STEPS = [
    *(significand / 2**23 for significand in (2**23 + 1, 2**23 + 3, 3 * 2**22 - 7)),
    *(significand / 2**23 for significand in (3 * 2**22 - 3, 2**24 - 4, 2**24 - 1)),
    *(1e-20, 1e-30, 1.1754945e-38, 1e-41),
]


@pytest.mark.parametrize("name", ["nvfp4", FOUR_OVER_SIX])
@pytest.mark.parametrize("step", HARD_STEPS)
def test_quotients_beside_ties(step: float, name: str, device: torch.device) -> None:
    # The scale byte of a block with this maximum is 1.0, so the step is the global scale.
    g = torch.tensor(step)
    values = representable("nvfp4")
    ties = (values[1:] + values[:-1]) / 2 * g
    points = (ties.view(torch.int32)[:, None] + torch.arange(-3, 4)).to(torch.int32)
    points = torch.cat([points.view(torch.float32).flatten().clamp(min=0), torch.zeros(11)])
    points = points.view(4, 15) * torch.tensor([1.0, -1.0]).repeat(8)[:15]
    rows = torch.cat([(6 * g).expand(4, 1), points], dim=1).view(2, 1, 32)
    cache = make_cache(make_layout(name, name, 1, 32), 1, device, k_global=step, v_global=step)
    slots = torch.tensor([1, 2])
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, -rows, slots, want)
    assert want.k_scale is not None
    if name == "nvfp4":
        assert (want.k_scale == format_of(name).one_scale).sum() == 4
    store(rows.to(device), -rows.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)


@pytest.mark.parametrize("name", [*QUANTIZED_NAMES, FOUR_OVER_SIX])
def test_every_step_of_the_block_scale(name: str, device: torch.device) -> None:
    # Maxima at, one below and one above the largest a scale holds, for every exponent.
    block, top = format_of(name).block, 448.0 if name == "mxfp8" else 6.0
    exact = torch.ldexp(torch.full((250,), top), torch.arange(-130, 120))
    bits = exact.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])
    maxima = bits.to(torch.int32).view(torch.float32).view(-1, 1)
    rows = torch.cat([maxima, maxima * torch.rand(len(maxima), block - 1)], dim=1)[:, None]
    cache = make_cache(make_layout(name, "bf16", 1, block, 16), 24, device, k_global=1.0)
    unused = torch.zeros(len(rows), 1, 16)
    slots = torch.arange(1, len(rows) + 1)
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, unused, slots, want)
    store(rows.to(device), unused.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)


@pytest.mark.parametrize("name", [*QUANTIZED_NAMES, FOUR_OVER_SIX])
def test_signs_of_what_is_nothing_beside_the_maximum(name: str, device: torch.device) -> None:
    """Products with the scale underflow; a number below zero still has the sign."""
    block = format_of(name).block
    row = torch.zeros(block)
    row[:7] = torch.tensor([3e38, -1e-18, 1e-18, -1e-30, -1e-45, -0.0, 0.0])
    rows = torch.stack([row, -row])[:, None]
    cache = make_cache(make_layout(name, "bf16", 1, block, 16), 1, device, k_global=1e30)
    unused, slots = torch.zeros(2, 1, 16), torch.tensor([1, 2])
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, unused, slots, want)
    store(rows.to(device), unused.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)


def representable(name: str) -> torch.Tensor:
    """Every magnitude of the element code, ascending, as float32."""
    if name == "mxfp8":
        return torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
