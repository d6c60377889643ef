"""MXFP4: E2M1 elements with ties to even, one E8M0 scale per 32 neighbours.

The rule of the OCP Microscaling Formats (MX) Specification v1.0, section 6.3: the scale's exponent
is that of the block's largest magnitude less E2M1's largest exponent, 2. So the largest element is
at most 8 over the scale, and what is above 6 saturates there. A scale below E8M0's range is its
smallest, 2^-127, which is the scale of a block of zeros, too.
"""

from __future__ import annotations

import torch

from inkling_backend.formats.e2m1_e8m0 import dequantize_blocks, quantize_blocks
from inkling_backend.formats.elements import E2M1_EXPONENT, floor_e8m0
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

BLOCK = 32


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]``, scale ``[..., D / 32]``; global_scale is not used."""
    return quantize_blocks(x, BLOCK, _scale_of, ties_to_even=True)


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    return dequantize_blocks(q)


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    return floor_e8m0(amax, E2M1_EXPONENT)


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
