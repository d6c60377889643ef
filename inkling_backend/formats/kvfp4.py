"""KVFP4: E2M1 elements with ties away from zero, one E8M0 scale per 16 neighbours."""

from __future__ import annotations

import torch

from inkling_backend.formats.e2m1_e8m0 import dequantize_blocks, quantize_blocks
from inkling_backend.formats.elements import E2M1_MAX, encode_e8m0
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

BLOCK = 16
# The byte of amax / 6 = 1e-10, which is as small as a block's maximum is taken to be.
ZERO_BLOCK_BYTE = 94


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]``, scale ``[..., D / 16]``; global_scale is not used."""
    return quantize_blocks(x, BLOCK, _scale_of, ties_to_even=False)


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `quantize`: float32 ``[..., D]``; NaN where the scale is NaN."""
    return dequantize_blocks(q)


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    return encode_e8m0(amax, E2M1_MAX, ZERO_BLOCK_BYTE)


KVFP4 = Format(
    name="kvfp4",
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
