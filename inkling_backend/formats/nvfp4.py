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
    blocks = to_blocks(x, BLOCK)
    return _quantized(*_encode(blocks, _block_scale(blocks, global_scale, E2M1_MAX), global_scale))


def quantize_four_over_six(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """As `quantize`, but a block's largest element becomes 4 where that has less squared error.

    The bytes mean the same, so readers need not know (the rule of "Four Over Six: More Accurate
    NVFP4 Quantization with Adaptive Block Scaling", arXiv 2512.02010). A scale for 4 that
    saturates at 448 is compared like any other, so the error is never above that of `quantize`.
    """
    blocks = to_blocks(x, BLOCK)
    scales = [_block_scale(blocks, global_scale, peak) for peak in (E2M1_MAX, FOUR)]
    six, four = (_encode(blocks, scale, global_scale) for scale in scales)
    step_six, step_four = (_step(scale, global_scale) for scale in scales)
    less = _squared_error(blocks, *four, step_four) < _squared_error(blocks, *six, step_six)
    take_four = (step_four > 0) & ((step_six == 0) | less)
    return _quantized(
        torch.where(take_four[..., None], four[0], six[0]), torch.where(take_four, four[1], six[1])
    )


def _block_scale(
    blocks: torch.Tensor, global_scale: torch.Tensor | None, peak: float
) -> torch.Tensor:
    """E4M3 scales ``[..., blocks]`` that put each maximum at ``peak``; NaN if it is not finite."""
    amax = blocks.abs().amax(-1)
    divisor = peak if global_scale is None else peak * global_scale
    scale = encode_e4m3(finite_or_zero(amax) / divisor)
    return torch.where(is_finite(amax), scale, E4M3_NAN)


def _step(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """float32 value of code 1 of every block."""
    step = decode_e4m3(scale)
    return step if global_scale is None else step * global_scale


def _encode(
    blocks: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., blocks, 16]`` under these scales, and the scales."""
    quotient = blocks.abs() / _step(scale, global_scale)[..., None]
    codes = encode_e2m1(quotient, blocks < 0, ties_to_even=True)
    # False for NaN, too.
    live = (decode_e4m3(scale) > 0)[..., None]
    return torch.where(live, codes, 0), scale


def _squared_error(
    blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Squared error ``[..., blocks]`` of codes over the global scale's square.

    Without the global scale nothing under- or overflows. Neighbours are added first, then
    neighbours of these, so that a kernel can have the same bits.
    """
    quotient = blocks.abs() / torch.where(step > 0, step, 1.0)[..., None]
    error = (decode_e2m1_packed(pack_nibbles(codes & 7)) - quotient).square()
    while error.shape[-1] > 1:
        error = error[..., 0::2] + error[..., 1::2]
    return error[..., 0] * decode_e4m3(scale).square()


def _quantized(codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
    return Quantized(pack_nibbles(codes.flatten(-2)), scale)


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    assert q.scale is not None
    packed = q.data.unflatten(-1, (q.scale.shape[-1], BLOCK // 2))
    values = decode_e2m1_packed(packed) * decode_e4m3(q.scale)[..., None]
    return (values if global_scale is None else values * global_scale).flatten(-2)


NVFP4 = Format(
    name="nvfp4",
    codes="e2m1-e4m3",
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
NVFP4_FOUR_OVER_SIX = replace(NVFP4, quantize=quantize_four_over_six, four_over_six=True)
