"""Every code under every scale, and queries, through the kernels' codec."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from inkling_backend import reference
from inkling_backend.formats import Quantized, Query, get_format
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.codec import load_query, load_rows
from inkling_backend.kernels.gather import gather
from inkling_backend.kernels.side import Side
from tests.kernels.helpers import (
    QUANTIZED_NAMES,
    assert_same_bits,
    make_cache,
    make_layout,
)

# Elements of a row that holds every code.
BLOCK_CODES = {name: 256 if name == "mxfp8" else get_format(name).block for name in QUANTIZED_NAMES}


@triton.jit
def load_kernel(
    data_ptr,
    scale_ptr,
    slots_ptr,
    mask_ptr,
    out_ptr,
    HEAD: tl.constexpr,
    N: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Whole tiles, padding columns included: out ``[programs * N, side.pad]``."""
    i_n = tl.program_id(0) * N + tl.arange(0, N)
    slot = tl.load(slots_ptr + i_n)
    mask = tl.load(mask_ptr + i_n) != 0
    tile = load_rows(data_ptr, scale_ptr, slot, HEAD, mask, SIDE)
    tl.store(out_ptr + i_n[:, None] * SIDE.pad + tl.arange(0, SIDE.pad)[None, :], tile)


@triton.jit
def query_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    QUANTIZED: tl.constexpr,
    M: tl.constexpr,
    LIVE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """The first LIVE of M rows."""
    row = tl.arange(0, M).to(tl.int64)
    mask = row < LIVE
    tile = load_query(data_ptr, scale_ptr, row * D, mask, QUANTIZED, D, D_PAD)
    tl.store(out_ptr + row[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], tile)


def load(cache: LayerCache, slots: torch.Tensor, mask: torch.Tensor, head: int = 0) -> torch.Tensor:
    """K tiles of 16 rows."""
    side = Side.of(cache.layout, cache.layout.k)
    out = torch.empty(len(slots), side.pad, dtype=torch.bfloat16, device=slots.device)
    load_kernel[(len(slots) // 16,)](
        cache.k_data,
        cache.k_scale,
        slots,
        mask.to(torch.uint8),
        out,
        HEAD=head,
        N=16,
        SIDE=side,
    )
    return out


@pytest.mark.parametrize("name", BLOCK_CODES)
def test_every_code_under_every_scale(name: str, device: torch.device) -> None:
    codes = BLOCK_CODES[name]
    layout = make_layout(name, name, 1, codes)
    cache = make_cache(layout, 8, device)
    assert cache.k_scale is not None
    code = torch.arange(codes, dtype=torch.uint8, device=device)
    row = code if name == "mxfp8" else (code[0::2] & 15) | (code[1::2] << 4)
    cache.k_data[:] = row
    slots = torch.arange(256, device=device)
    scales = slots.to(torch.uint8)[:, None].expand(-1, layout.k.blocks).contiguous()
    cache.k_scale.view(-1)[layout.scale_offsets(layout.k, slots).flatten()] = scales.flatten()
    want = layout.k.format.dequantize(Quantized(cache.k_data[:, 0], scales), None)
    got = load(cache, slots, torch.ones_like(slots))
    assert_same_bits(got, want.to(torch.bfloat16), "tile")
    one = torch.ones(1, device=device) if layout.k.format.has_global_scale else None
    want = layout.k.format.dequantize(Quantized(cache.k_data[1:, 0], scales[1:]), one)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = LayerCache(
            layout, cache.k_data, cache.v_data, cache.k_scale, cache.v_scale, one, one
        )
        got = gather(slots[1:], plain, "k", dtype)[:, 0]
        assert_same_bits(got, want.to(dtype), str(dtype))


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize(
    ("name", "dim"), [("mxfp8", 96), ("nvfp4", 80), ("kvfp4", 192), ("mxfp4", 96), ("bf16", 48)]
)
def test_order_heads_and_masks(name: str, dim: int, page: int, device: torch.device) -> None:
    layout = make_layout(name, name, 3, dim, page=page)
    cache = make_cache(layout, 3, device)
    # Poison reads back as a plausible number, so make it NaN where it must not be read.
    for buffer in (cache.k_data, cache.k_scale):
        if buffer is not None:
            buffer.fill_(0xFF) if buffer.dtype == torch.uint8 else buffer.fill_(float("nan"))
    slots = torch.randperm(3 * page - 1)[:32] + 1
    rows = torch.randn(32, 3, dim)
    mask = torch.arange(32) % 3 != 1
    reference.store(rows[mask].to(device), rows[mask].to(device), slots[mask].to(device), cache)
    for head in range(3):
        got = load(cache, slots.to(device), mask.to(device), head).cpu()
        side = layout.k.format
        g = None if cache.k_global is None else cache.k_global.cpu()
        stored = side.quantize(rows[:, head], g)
        want = side.dequantize(stored, None).to(torch.bfloat16)
        assert_same_bits(got[:, :dim], torch.where(mask[:, None], want, 0), "rows")
        assert_same_bits(got[:, dim:], torch.zeros_like(got[:, dim:]), "padding columns")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_query_as_it_is(dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.randn(5, 96).to(dtype).to(device)
    out = torch.empty(16, 128, dtype=dtype, device=device)
    query_kernel[(1,)](rows, None, out, QUANTIZED=False, M=16, LIVE=5, D=96, D_PAD=128)
    want = torch.zeros_like(out)
    want[:5, :96] = rows
    assert_same_bits(out, want, "query")


def test_quantized_query(device: torch.device) -> None:
    query = Query.quantize((torch.randn(5, 96) * 50).to(device))
    out = torch.empty(16, 128, dtype=torch.bfloat16, device=device)
    query_kernel[(1,)](query.data, query.scale, out, QUANTIZED=True, M=16, LIVE=5, D=96, D_PAD=128)
    want = torch.zeros_like(out)
    want[:5, :96] = query.dequantize().to(torch.bfloat16)
    assert_same_bits(out, want, "query")
