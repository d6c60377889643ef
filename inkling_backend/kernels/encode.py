"""Number formats inside kernels: tiles to codes and scale bytes, exact to the bit.

Compiled code takes what the interpreter lacks: fused multiply-add, directed rounding, conversions,
moves of bytes. What is interpreted instead gives the same bits.

Tiles are ``[U, R, C, 8]``: element ``8 * c + i`` of each unit of ``8 * C`` neighbours at
``[:, :, c, i]``. A unit is a block, half a block (mxfp8) or anything (bf16), and lies in a thread.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from inkling_backend.kernels.codec import (
    ABS_BITS,
    E4M3_NAN,
    E8M0_NAN,
    INF_BITS,
    INTERPRETED,
    e4m3_value,
    round_bf16,
    scale_offset,
)

_SIGN_BIT = tl.constexpr(-0x80000000)
_MXFP8_FLOOR = tl.constexpr(1e-30)
_MXFP8_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", 1e-30))[0])
_MAGIC_BITS = tl.constexpr(0x4B400000)  # of 1.5 * 2**23
# Global scales below this would let remainders underflow: everything is raised first.
_TINY = tl.constexpr(2.0**-40)
_RAISE = tl.constexpr(2.0**64)
_LEAST_STEP = tl.constexpr(2.0**-100)


@triton.jit
def _round_codes(value, MAN: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Magnitude codes of ``value >= 0`` (float32), nearest even, saturating at code MAX; int32.

    The target has MAN mantissa bits and the exponent bias BIAS; NaN gives no useful code.
    """
    bits = value.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MAN
    normal = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (normal >> SHIFT) - ((127 - BIAS) << MAN)
    # Below the smallest normal number one float32 addition rounds to the target's quantum.
    MAGIC_BITS: tl.constexpr = (127 + 24 - BIAS - MAN) << 23
    MAGIC: tl.constexpr = float(1 << (24 - BIAS - MAN))
    low = (value + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < ((128 - BIAS) << 23), low, normal)
    return tl.minimum(code, MAX)


@triton.jit
def _half_up_words(x, factor):
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
def _signed_words(value, code):
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
def _even_words(x, step):
    """E2M1 codes of ``x / step``, ties to even, saturating.

    Codes rise by one per 0.5 up to 2, per 1 up to 4, per 2 up to 6: the least of three lines, each
    rounded by the addition of a number whose last bit is worth 1. All products are exact.

    Args:
        x: float32 ``[U, R, C, 8]``.
        step: float32 ``[U, R]``, positive, 2**-64 to 2**126 unless interpreted.

    Returns:
        int32 ``[U, R, C]``, eight codes each, the first lowest.
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
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2**23
    # As integers, which order alike; NaN, from infinite quotients, is the greatest.
    line0 = tl.fma(value, 2.0, MAGIC).to(tl.int32, bitcast=True)
    line1 = (value + (MAGIC + 2)).to(tl.int32, bitcast=True)
    line2 = tl.fma(value, 0.5, MAGIC + 4).to(tl.int32, bitcast=True)
    code = tl.minimum(tl.minimum(tl.minimum(line0, line1), line2), _MAGIC_BITS + 7)
    return _signed_words(signed, code)


@triton.jit
def _nan_or_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """Bits of each block's largest magnitude ``[U, R]``, NaN above all; x is ``[U, R, C, 8]``."""
    if INTERPRETED:  # is slow at reductions that it does not know
        bits = x.to(tl.int32, bitcast=True) & ABS_BITS
        return tl.max(tl.max(bits, axis=3), axis=2)
    else:
        largest = tl.reduce(tl.reduce(tl.abs(x), 3, _nan_or_max), 2, _nan_or_max)
        return largest.to(tl.int32, bitcast=True)


@triton.jit
def _nearest_e4m3(value, HARDWARE: tl.constexpr):
    """Codes of ``value >= 0``, int32, and their float32 values."""
    if HARDWARE:
        code = value.to(tl.float8e4nv)
        return code.to(tl.uint8, bitcast=True).to(tl.int32), code.to(tl.float32)
    else:
        code = _round_codes(value, 3, 7, 0x7E)
        return code, e4m3_value(code.to(tl.uint8))


@triton.jit
def _hardware_e4m3(value, x):
    """uint8 codes of ``value`` by the conversion of newer GPUs (SM89 on), with the sign of x.

    It rounds to nearest even and saturates, as `_round_codes` does, but gives every NaN the same
    sign. PTX ISA: ``cvt.rn.satfinite.e4m3x2.f32``.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high; .reg .b32 codes, a, b;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 codes, {low, high};
        prmt.b32 a, $5, $6, 0x0073; prmt.b32 b, $7, $8, 0x0073; prmt.b32 a, a, b, 0x5410;
        lop3.b32 $0, codes, a, 0x80808080, 0xf8;
        }""",
        "=r,r,r,r,r,r,r,r,r",
        [value, x],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _power_of_two(exponent_field):
    """float32 ``2**(exponent_field - 127)`` for fields 1..254."""
    return (exponent_field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mxfp8_codes(x, HARDWARE: tl.constexpr):
    """E4M3 codes uint8 ``[U, R, C, 8]`` and scale bytes int32 ``[U, R]``; x as in `encode`."""
    U: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    bits = x.to(tl.int32, bitcast=True)
    if HARDWARE:
        clean = tl.fma(x, 0.0, x)  # NaN for infinities too
        # Maxima pass over NaN.
        amax = tl.max(tl.max(tl.abs(clean), axis=3), axis=2)
        amax = tl.max(tl.reshape(amax, (U // 2, 2, R)), axis=1)
        amax = tl.maximum(amax, _MXFP8_FLOOR).to(tl.int32, bitcast=True)
    else:
        magnitude = bits & ABS_BITS
        finite = magnitude < INF_BITS
        # Positive floats order like their bits.
        amax = tl.max(tl.max(tl.where(finite, magnitude, 0), axis=3), axis=2)
        amax = tl.max(tl.reshape(amax, (U // 2, 2, R)), axis=1)
        amax = tl.maximum(amax, _MXFP8_FLOOR_BITS)
    # e + 127 with e the smallest integer such that amax <= 1.75 * 2**8 * 2**e.
    byte = ((amax + 0x1FFFFF) >> 23) - 8
    byte = tl.reshape(tl.broadcast_to(byte[:, None, :], (U // 2, 2, R)), (U, R))
    factor = _power_of_two(254 - byte)[:, :, None, None]
    if HARDWARE:
        return _hardware_e4m3(clean * factor, x), byte
    else:
        code = _round_codes(tl.abs(x) * factor, 3, 7, 0x7E)
        code = tl.where(finite, code, E4M3_NAN) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8), byte


@triton.jit
def encode(x, global_scale, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes and scale bytes of a tile of rows.

    Args:
        x: ``[U, R, C, 8]`` float32, from `to_float32`.
        global_scale: float32 scalar, positive; read by nvfp4 only.
        SIDE: a `Side`.
        HARDWARE: whether the GPU converts to E4M3; changes no bit.

    Returns:
        ``(data, scale)``: data ``[U, R, items]``, a unit's uint8 (mxfp8), bfloat16 (bf16) or int32,
        eight codes each; scale ``[U, R]`` uint8, of the unit's block, meaningless for bf16.
    """
    FMT: tl.constexpr = SIDE.fmt
    U: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    if FMT == "bf16":
        return tl.reshape(round_bf16(x), (U, R, C * 8)), tl.zeros((U, R), tl.uint8)
    elif FMT == "mxfp8":
        code, byte = _mxfp8_codes(x, HARDWARE)
        return tl.reshape(code, (U, R, C * 8)), byte.to(tl.uint8)
    else:
        tl.static_assert(FMT == "nvfp4" or FMT == "kvfp4")
        # E2M1 has no NaN: one non-finite element makes its block's scale NaN.
        amax = _largest(x)  # [U, R]
        whole = amax < INF_BITS
        if FMT == "kvfp4":
            # e + 127 with e the smallest integer such that amax <= 1.5 * 2**2 * 2**e.
            byte = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 94)
            factor = _power_of_two(254 - byte)[:, :, None, None]
            word = _half_up_words(x, tl.broadcast_to(factor, x.shape))
            byte = tl.where(whole, byte, E8M0_NAN)
            live = whole
        else:
            ratio = tl.div_rn(amax.to(tl.float32, bitcast=True), 6.0 * global_scale)
            byte, value = _nearest_e4m3(ratio, HARDWARE)
            live = whole & (byte > 0)
            step = tl.where(live, value * global_scale, 1.0)
            if not INTERPRETED:
                # Where steps are tiny, raise all, or remainders would underflow. A step of 0.0 must
                # send all but zeros to the largest code.
                while global_scale < _TINY:
                    global_scale *= _RAISE
                    x *= _RAISE
                    step = tl.maximum(step * _RAISE, _LEAST_STEP)
            word = _even_words(x, step)
            byte = tl.where(whole, byte, E4M3_NAN)
        return tl.where(live[:, :, None], word, 0), byte.to(tl.uint8)


@triton.jit
def store_rows(data_ptr, scale_ptr, slot, head, mask, data, scale, SIDE: tl.constexpr):
    """Write what `encode` returned; the arguments are those of `load_rows`."""
    U: tl.constexpr = data.shape[0]
    ITEMS: tl.constexpr = data.shape[2]  # of a unit
    UNIT: tl.constexpr = SIDE.pad // U
    if data.dtype == tl.int32:
        data_ptr = data_ptr.to(tl.pointer_type(tl.int32))
    unit = tl.arange(0, U)[:, None]
    m_unit = mask[None, :] & (unit < SIDE.dim // UNIT)
    row = (slot * SIDE.heads + head) * (SIDE.dim // UNIT * ITEMS)
    p_data = data_ptr + (row[None, :] + unit * ITEMS)[:, :, None]
    p_data = p_data + tl.arange(0, ITEMS)[None, None, :]
    tl.store(p_data, data, mask=m_unit[:, :, None])
    if SIDE.block > 0:
        block = unit // (SIDE.block // UNIT)
        p_scale = scale_ptr + scale_offset(slot, head, SIDE)[None, :] + block * SIDE.s_blk
        tl.store(p_scale, scale, mask=m_unit & (unit % (SIDE.block // UNIT) == 0))
