"""NVFP4: E2M1 elements with ties to even, one E4M3 scale per 16 neighbours, a global scale.

``value = code * scale * global_scale``. E2M1 has no NaN. A block that holds a NaN or an infinity
gets zero codes and the NaN scale, so all of its 16 elements, and none outside it, read back as NaN.
"""

from __future__ import annotations

from dataclasses import replace

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


# Peak of a block whose largest element becomes code 4: finer near the top than 6, whose neighbour
# below is 4.
FOUR = 4.0


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]`` and scale ``[..., D / 16]``.

    Args:
        global_scale: ``[1]`` float32 on x's device, positive; None means 1.
    """
    codes, scale = _encode(to_blocks(x, BLOCK), global_scale, E2M1_MAX)
    return Quantized(pack_nibbles(codes.flatten(-2)), scale)


def quantize_four_over_six(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """As `quantize`, but a block's largest element becomes 4 where that has less squared error.

    The bytes mean the same, so readers need not know (the rule of "Four Over Six: More Accurate
    NVFP4 Quantization with Adaptive Block Scaling").
    """
    blocks = to_blocks(x, BLOCK)
    six, four = (_encode(blocks, global_scale, peak) for peak in (E2M1_MAX, FOUR))
    error_six, error_four = (
        (_decode(pack_nibbles(codes), scale[..., None], global_scale) - blocks).square().sum(-1)
        for codes, scale in (six, four)
    )
    take_four = error_four < error_six
    codes = torch.where(take_four[..., None], four[0], six[0])
    return Quantized(pack_nibbles(codes.flatten(-2)), torch.where(take_four, four[1], six[1]))


def _encode(
    blocks: torch.Tensor, global_scale: torch.Tensor | None, peak: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., blocks, 16]`` and scales ``[..., blocks]`` with each maximum at ``peak``."""
    g = blocks.new_ones(1) if global_scale is None else global_scale
    amax = blocks.abs().amax(-1)
    finite = is_finite(amax)
    scale = encode_e4m3(finite_or_zero(amax) / (peak * g))
    live = (finite & (scale > 0))[..., None]
    step = (decode_e4m3(scale) * g)[..., None]
    codes = encode_e2m1(blocks.abs() / step, blocks < 0, ties_to_even=True)
    return torch.where(live, codes, 0), torch.where(finite, scale, E4M3_NAN)


def _decode(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """float32 of blocks ``[..., blocks, 8]`` with scales ``[..., blocks, 1]``."""
    values = decode_e2m1_packed(packed) * decode_e4m3(scale)
    return values if global_scale is None else values * global_scale


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    assert q.scale is not None
    packed = q.data.unflatten(-1, (q.scale.shape[-1], BLOCK // 2))
    return _decode(packed, q.scale[..., None], global_scale).flatten(-2)


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
# Off by default: the bytes of a recipe are those of its plain rule.
NVFP4_FOUR_OVER_SIX = replace(NVFP4, quantize=quantize_four_over_six)
