"""Element and scale codes as plain torch, exact on every device and without a host sync.

A code is a uint8 tensor, a value a float32 tensor of the same shape. Every value of every code here
is a float32 number, so decoding is exact; encoding rounds once.
"""

from __future__ import annotations

import math

import torch

from inkling_backend.errors import InvalidTensorError

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E2M1_MAX = 6.0
# Of its largest number.
E2M1_EXPONENT = 2
E8M0_NAN = 0xFF
FLOAT32_MAX = torch.finfo(torch.float32).max

_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """``[..., D]`` floating point -> ``[..., D // block, block]`` float32.

    Raises:
        InvalidTensorError: the last dimension is not a multiple of ``block``, or x is not floating.
    """
    if not x.dtype.is_floating_point:
        raise InvalidTensorError("x", "a floating point dtype", "(bf16, fp16, fp32)", x.dtype)
    if x.ndim == 0 or x.shape[-1] % block:
        raise InvalidTensorError("x", "last dimension a multiple of", block, tuple(x.shape))
    return x.detach().float().unflatten(-1, (x.shape[-1] // block, block))


def is_finite(x: torch.Tensor) -> torch.Tensor:
    """Bool of x's shape: neither NaN nor infinite."""
    return x.abs() <= FLOAT32_MAX


def finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    """x with NaN and infinities replaced by zero."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 -> E4M3 codes: nearest even, saturating at 448 (infinities too); NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes -> float32; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e8m0(amax: torch.Tensor, peak: float, floor: int) -> torch.Tensor:
    """Byte of the smallest power of two ``2^e`` with ``amax <= peak * 2^e``.

    Args:
        amax: float32, finite and not negative.
        peak: the element code's largest value.
        floor: the smallest byte to give; it must lie above every result for a subnormal amax.

    Returns:
        uint8 ``max(e + 127, floor)``.
    """
    mantissa, exponent = math.frexp(peak)
    # The first addend carries into the exponent exactly if amax's mantissa exceeds peak's.
    addend = 0x7FFFFF - int((2 * mantissa - 1) * 2**23) - ((exponent - 1) << 23)
    return ((amax.view(torch.int32) + addend) >> 23).clamp(min=floor).to(torch.uint8)


def floor_e8m0(amax: torch.Tensor, exponent: int) -> torch.Tensor:
    """Byte of ``2^(floor(log2(amax)) - exponent)``, at least 0, which a maximum of zero has, too.

    Args:
        amax: float32, finite and not negative.
        exponent: of the element code's largest value; at least 2, or subnormals would show.

    Returns:
        uint8 of amax's shape.
    """
    return ((amax.view(torch.int32) >> 23) - exponent).clamp(min=0).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> float32 ``2^(byte - 127)``; byte 0 is a subnormal, 0xFF is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()


def encode_e2m1(
    magnitude: torch.Tensor, negative: torch.Tensor, *, ties_to_even: bool
) -> torch.Tensor:
    """E2M1 codes 0..15, saturating at 6.

    Args:
        magnitude: float32, not negative. NaN has no code and gives 0: mark it in the scale.
        negative: bool, the sign; a negative number that rounds to zero gives code 8.
        ties_to_even: magnitudes halfway between two codes take the even one; otherwise the larger.
    """
    codes = negative.to(torch.uint8) << 3
    for lower, bound in enumerate(_E2M1_BOUNDS):
        tie_goes_up = lower % 2 == 1 or not ties_to_even
        codes += magnitude >= bound if tie_goes_up else magnitude > bound
    return codes


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 ``[..., D]`` -> bytes ``[..., D / 2]``, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1_packed(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of two E2M1 codes ``[..., D / 2]`` -> float32 ``[..., D]``."""
    # E2M1's exponent and mantissa put into E4M3's lowest exponent bits are the value / 64.
    low = ((packed & 0x08) << 4) | ((packed & 0x07) << 2)
    high = (packed & 0x80) | ((packed & 0x70) >> 2)
    return decode_e4m3(torch.stack((low, high), dim=-1).flatten(-2)) * 64
