"""NVFP4: E2M1 elements with ties to even, one E4M3 scale per 16 neighbours, a global scale.

``value = code * scale * global_scale``. E2M1 has no NaN. A block that holds a NaN or an infinity
gets zero codes and the NaN scale, so all of its 16 elements, and none outside it, read back as NaN.
"""

from __future__ import annotations

import torch

from inkling_backend.formats.elements import (
    E2M1_MAX,
    E4M3_NAN,
    decode_e2m1_packed,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    finite_or_zero,
    is_finite,
    pack_nibbles,
    to_blocks,
)
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

BLOCK = 16


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]`` and scale ``[..., D / 16]``.

    Args:
        global_scale: ``[1]`` float32 on x's device, positive; None means 1.
    """
    blocks = to_blocks(x, BLOCK)
    g = x.new_ones(1, dtype=torch.float32) if global_scale is None else global_scale
    amax = blocks.abs().amax(-1)
    finite = is_finite(amax)
    scale = encode_e4m3(finite_or_zero(amax) / (E2M1_MAX * g))
    live = (finite & (scale > 0))[..., None]
    step = (decode_e4m3(scale) * g)[..., None]
    codes = encode_e2m1(blocks.abs() / step, blocks < 0, ties_to_even=True)
    codes = torch.where(live, codes, 0)
    return Quantized(pack_nibbles(codes.flatten(-2)), torch.where(finite, scale, E4M3_NAN))


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    assert q.scale is not None
    values = decode_e2m1_packed(q.data).unflatten(-1, (q.scale.shape[-1], BLOCK))
    values = (values * decode_e4m3(q.scale)[..., None]).flatten(-2)
    return values if global_scale is None else values * global_scale


NVFP4 = Format(
    name="nvfp4",
    element_bits=4,
    block=BLOCK,
    one_scale=0x38,
    has_global_scale=True,
    k_order=ScaleOrder.TOKEN_MAJOR,
    v_order=ScaleOrder.BLOCK_MAJOR,
    quantize=quantize,
    dequantize=dequantize,
)
