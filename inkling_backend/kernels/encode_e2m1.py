"""E2M1 codes inside kernels: tiles of numbers to words of eight codes, exact to the bit.

Tiles are those of `encode`: ``[U, R, C, 8]``, eight neighbours in a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_backend.kernels.codec import INTERPRETED

_SIGN_BIT = tl.constexpr(-0x80000000)
_MAGIC = tl.constexpr(1.5 * 2**23)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def half_up_words(x, factor):
    """E2M1 codes of ``x * factor``, magnitudes <= 6, ties away from zero.

    Args:
        x: float32 ``[U, R, C, 8]``.
        factor: float32 powers of two, of x's shape.

    Returns:
        int32 ``[U, R, C]``, eight codes each, the first lowest.
    """
    if INTERPRETED:  # has no directed rounding
        value = tl.abs(x) * factor
        normal = ((value.to(tl.int32, bitcast=True) + (1 << 21)) >> 22) - 252
        low = tl.where(value >= 0.75, 2, tl.where(value >= 0.25, 1, 0))
        code = tl.where(value < 1.0, low, tl.minimum(normal, 7))
        nibble = (code << 28) | tl.where(x < 0, _SIGN_BIT, 0)
    else:
        # Times 2**-126, bits 24..22 of a float32 are the code, subnormals included. Rounding to
        # zero passes no bound. Adding zero leaves -0.0 without a sign.
        nibble = tl.inline_asm_elementwise(
            """{
            .reg .f32 value; .reg .b32 bits, code;
            fma.rz.f32 value, $1, $2, 0f00000000; mul.rz.f32 value, value, 0f00800000;
            mov.b32 bits, value; mad.lo.s32 code, bits, 64, 0x08000000;
            lop3.b32 $0, code, bits, 0x80000000, 0xd8;
            }""",
            "=r,r,r",
            [x, factor],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    n0, n1, n2, n3, n4, n5, n6, n7 = _neighbours(nibble)
    word = _shift_in(_shift_in(_shift_in(n7.to(tl.uint32, bitcast=True) >> 28, n6), n5), n4)
    word = _shift_in(_shift_in(_shift_in(_shift_in(word, n3), n2), n1), n0)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _shift_in(word, nibble):
    """``word`` moved up by four bits, and bits 31..28 of ``nibble`` below: one funnel shift."""
    return (word << 4) | (nibble.to(tl.uint32, bitcast=True) >> 28)


@triton.jit
def _neighbours(x):
    """``[U, R, C, 8]`` to the eight ``[U, R, C]`` along the last axis."""
    U: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    even, odd = tl.split(tl.reshape(x, (U, R, C, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _sign_bit(bits, to):
    return ((bits >> 31) & 1) << to


@triton.jit
def signed_words(value, code):
    """Words of eight codes 0..7 each, the first lowest, with the signs of ``value``.

    Args:
        value: float32 ``[U, R, C, 8]``.
        code: int32 like value, plus _MAGIC_BITS.

    Returns:
        int32 ``[U, R, C]``.
    """
    v0, v1, v2, v3, v4, v5, v6, v7 = _neighbours(value.to(tl.int32, bitcast=True))
    c0, c1, c2, c3, c4, c5, c6, c7 = _neighbours(code)
    low = ((c3 * 16 + c2) * 16 + c1) * 16 + c0
    high = ((c7 * 16 + c6) * 16 + c5) * 16 + c4
    word = (high << 16) + low - 0x3F400000
    if INTERPRETED:
        even = _sign_bit(v0, 3) | _sign_bit(v2, 11) | _sign_bit(v4, 19) | _sign_bit(v6, 27)
        sign = even | _sign_bit(v1, 7) | _sign_bit(v3, 15) | _sign_bit(v5, 23) | _sign_bit(v7, 31)
    else:
        # A byte of each sign, those of even and of odd elements apart.
        sign = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $1, $3, 0x00fb; prmt.b32 b, $5, $7, 0x00fb; prmt.b32 a, a, b, 0x5410;
            prmt.b32 c, $2, $4, 0x00fb; prmt.b32 d, $6, $8, 0x00fb; prmt.b32 c, c, d, 0x5410;
            lop3.b32 a, a, c, 0x0f0f0f0f, 0xe4; and.b32 $0, a, 0x88888888;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [v0, v1, v2, v3, v4, v5, v6, v7],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word | sign


@triton.jit
def _inverse(x):
    """``1 / x``, float32 to nearest even."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def even_codes(x, step):
    """E2M1 codes of ``x / step``, ties to even, saturating. All products are exact.

    Args:
        x: float32 ``[U, R, C, 8]``.
        step: float32 ``[U, R]``, positive, 2**-64 to 2**126 unless interpreted.

    Returns:
        ``(signed, value, code)`` of x's shape: float32 with the sign of the element, float32
        ``|x / step|`` to nearest even, int32 codes 0..7 plus _MAGIC_BITS.
    """
    # Adding zero leaves -0.0 without a sign.
    if INTERPRETED:  # has no fused multiply-add
        signed = x + 0.0
        value = tl.div_rn(x, tl.broadcast_to(step[:, :, None, None], x.shape))
    else:
        # One division a block; its elements' quotients are corrected by their exact remainder.
        inverse = tl.broadcast_to(_inverse(step)[:, :, None, None], x.shape)
        minus_step = tl.broadcast_to(-step[:, :, None, None], x.shape)
        signed = tl.fma(x, inverse, 0.0)
        value = tl.fma(tl.fma(signed, minus_step, x), inverse, signed)
    value = tl.abs(value)
    return signed, value, _nearest(value)


@triton.jit
def _nearest(value):
    """Codes 0..7 plus _MAGIC_BITS of ``value >= 0``, ties to even, saturating.

    Codes rise by one per 0.5 up to 2, per 1 up to 4, per 2 up to 6: the least of three lines, each
    rounded by the addition of a number whose last bit is worth 1.
    """
    # As integers, which order alike; NaN, from infinite quotients, is the greatest.
    line0 = tl.fma(value, 2.0, _MAGIC).to(tl.int32, bitcast=True)
    line1 = (value + (_MAGIC + 2)).to(tl.int32, bitcast=True)
    line2 = tl.fma(value, 0.5, _MAGIC + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(tl.minimum(line0, line1), line2), _MAGIC_BITS + 7)


@triton.jit
def even_words(x, factor):
    """E2M1 codes of ``x * factor``, ties to even, saturating; arguments as in `half_up_words`."""
    # The sign is that of x, as the product may underflow; adding zero leaves -0.0 without one.
    return signed_words(x + 0.0, _nearest(tl.abs(x) * factor))


@triton.jit
def squared_error(value, code):
    """Sums ``[U, R]`` of ``(E2M1 value of code - value) ** 2``; arguments from `even_codes`.

    In the order of `formats.nvfp4`, with every product rounded before it is added.
    """
    # Times 2**126, a float32 with the code in bits 24..22 is its value, subnormals included.
    scaled = (code << 22).to(tl.float32, bitcast=True)
    difference = tl.fma(scaled, 2.0**126, -value)
    e0, e1, e2, e3, e4, e5, e6, e7 = _neighbours(tl.fma(difference, difference, 0.0))
    low, high = tl.split(((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7)))
    return low + high
