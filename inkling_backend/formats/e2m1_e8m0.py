"""What formats of E2M1 elements under E8M0 block scales share; each brings its block and its rules.

E2M1 has no NaN. A block that holds a NaN or an infinity gets zero codes and the NaN scale, so all
of its elements, and none outside it, read back as NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inkling_backend.formats.elements import (
    E8M0_NAN,
    decode_e2m1_packed,
    decode_e8m0,
    encode_e2m1,
    finite_or_zero,
    is_finite,
    pack_nibbles,
    to_blocks,
)
from inkling_backend.formats.spec import Quantized


def quantize_blocks(
    x: torch.Tensor,
    block: int,
    scale_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    ties_to_even: bool,
) -> Quantized:
    """``[..., D]`` -> data ``[..., D / 2]``, scale ``[..., D / block]``.

    Args:
        block: neighbours that share a scale.
        scale_of: E8M0 bytes of finite block maxima, float32.
        ties_to_even: as of `encode_e2m1`.
    """
    blocks = to_blocks(x, block)
    amax = blocks.abs().amax(-1)
    finite = is_finite(amax)
    scale = scale_of(finite_or_zero(amax))
    magnitude = blocks.abs() / decode_e8m0(scale)[..., None]
    codes = encode_e2m1(magnitude, blocks < 0, ties_to_even=ties_to_even)
    codes = torch.where(finite[..., None], codes, 0)
    return Quantized(pack_nibbles(codes.flatten(-2)), torch.where(finite, scale, E8M0_NAN))


def dequantize_blocks(q: Quantized) -> torch.Tensor:
    """Inverse of `quantize_blocks`: float32 ``[..., D]``; NaN where the scale is NaN."""
    assert q.scale is not None
    values = decode_e2m1_packed(q.data).unflatten(-1, (q.scale.shape[-1], -1))
    return (values * decode_e8m0(q.scale)[..., None]).flatten(-2)
