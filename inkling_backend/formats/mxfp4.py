"""MXFP4: E2M1 elements with ties to even, one E8M0 scale per 32 neighbours.

The rule of the OCP Microscaling Formats (MX) Specification v1.0, section 6.3: the scale's exponent
is that of the block's largest magnitude less E2M1's largest exponent, 2. So the largest element is
at most 8 over the scale, and what is above 6 saturates there. A scale below E8M0's range is its
smallest, 2^-127, which is the scale of a block of zeros, too.

E2M1 has no NaN. A block that holds a NaN or an infinity gets zero codes and the NaN scale, so all
of its 32 elements, and none outside it, read back as NaN.
"""

from __future__ import annotations

import torch

from inkling_backend.formats.elements import (
    E2M1_EXPONENT,
    E8M0_NAN,
    decode_e2m1_packed,
    decode_e8m0,
    encode_e2m1,
    finite_or_zero,
    floor_e8m0,
    is_finite,
    pack_nibbles,
    to_blocks,
)
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

BLOCK = 32


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]``, scale ``[..., D / 32]``; global_scale is not used."""
    blocks = to_blocks(x, BLOCK)
    amax = blocks.abs().amax(-1)
    finite = is_finite(amax)
    scale = floor_e8m0(finite_or_zero(amax), E2M1_EXPONENT)
    magnitude = blocks.abs() / decode_e8m0(scale)[..., None]
    codes = encode_e2m1(magnitude, blocks < 0, ties_to_even=True)
    codes = torch.where(finite[..., None], codes, 0)
    return Quantized(pack_nibbles(codes.flatten(-2)), torch.where(finite, scale, E8M0_NAN))


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    assert q.scale is not None
    values = decode_e2m1_packed(q.data).unflatten(-1, (q.scale.shape[-1], BLOCK))
    return (values * decode_e8m0(q.scale)[..., None]).flatten(-2)


MXFP4 = Format(
    name="mxfp4",
    codes="e2m1-e8m0",
    element_bits=4,
    block=BLOCK,
    one_scale=127,
    has_global_scale=False,
    k_order=ScaleOrder.TOKEN_MAJOR,
    v_order=ScaleOrder.BLOCK_MAJOR,
    quantize=quantize,
    dequantize=dequantize,
)
