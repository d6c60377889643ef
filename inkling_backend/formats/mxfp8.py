"""MXFP8: E4M3 elements, one E8M0 scale per 32 neighbours.

A NaN or an infinity becomes the E4M3 NaN of its sign. It does not count for its block's scale, so
its neighbours keep the values they have without it.
"""

from __future__ import annotations

import torch

from inkling_backend.formats.elements import (
    E4M3_MAX,
    E4M3_NAN,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0,
    finite_or_zero,
    is_finite,
    to_blocks,
)
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

BLOCK = 32
# The byte of amax = 1e-30, which is as small as a block's maximum is taken to be.
ZERO_BLOCK_BYTE = 19


def block_scale(amax: torch.Tensor) -> torch.Tensor:
    """float32 finite block maxima -> uint8 E8M0 scales of the same shape."""
    return encode_e8m0(amax, E4M3_MAX, ZERO_BLOCK_BYTE)


def encode_scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values over broadcastable E8M0 scales -> uint8 E4M3 codes of x's shape."""
    codes = encode_e4m3(x / decode_e8m0(scale))
    # From the input's bits, because arithmetic need not keep the sign of a NaN.
    nan = (x.view(torch.int32) >> 24).to(torch.uint8) | E4M3_NAN
    return torch.where(is_finite(x), codes, nan)


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D]`` and scale ``[..., D / 32]``; no global scale is used."""
    blocks = to_blocks(x, BLOCK)
    scale = block_scale(finite_or_zero(blocks).abs().amax(-1))
    return Quantized(encode_scaled(blocks, scale[..., None]).flatten(-2), scale)


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where a code or its scale is NaN."""
    assert q.scale is not None
    values = decode_e4m3(q.data).unflatten(-1, (q.scale.shape[-1], BLOCK))
    return (values * decode_e8m0(q.scale)[..., None]).flatten(-2)


MXFP8 = Format(
    name="mxfp8",
    codes="e4m3-e8m0",
    element_bits=8,
    block=BLOCK,
    one_scale=127,
    has_global_scale=False,
    k_order=ScaleOrder.FA4,
    v_order=ScaleOrder.FA4,
    quantize=quantize,
    dequantize=dequantize,
)
