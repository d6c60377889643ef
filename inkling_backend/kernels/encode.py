"""Number formats inside kernels: tiles to codes and scale bytes, exact to the bit.

Compiled code takes what the interpreter lacks: fused multiply-add, directed rounding, conversions,
moves of bytes. What is interpreted instead gives the same bits.

Tiles are ``[U, R, C, 8]``: element ``8 * c + i`` of each unit of ``8 * C`` neighbours at
``[:, :, c, i]``. A unit is a block, half a block of 32, or anything (bf16), and lies in a thread.
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
from inkling_backend.kernels.encode_e2m1 import (
    even_codes,
    even_words,
    half_up_words,
    signed_words,
    squared_error,
)

_MXFP8_FLOOR = tl.constexpr(1e-30)
_MXFP8_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", 1e-30))[0])
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
def _larger_half(amax):
    """Of blocks of two units ``[U, R]`` the larger number, ``[U / 2, R]``."""
    return tl.max(tl.reshape(amax, (amax.shape[0] // 2, 2, amax.shape[1])), axis=1)


@triton.jit
def _for_both_halves(x):
    """``[U / 2, R]`` of blocks to ``[U, R]`` of their two units."""
    B: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (B, 2, R)), (B * 2, R))


@triton.jit
def _mxfp8_codes(x, HARDWARE: tl.constexpr):
    """E4M3 codes uint8 ``[U, R, C, 8]`` and scale bytes int32 ``[U, R]``; x as in `encode`."""
    bits = x.to(tl.int32, bitcast=True)
    if HARDWARE:
        clean = tl.fma(x, 0.0, x)  # NaN for infinities too
        # Maxima pass over NaN.
        amax = tl.max(tl.max(tl.abs(clean), axis=3), axis=2)
        amax = _larger_half(amax)
        amax = tl.maximum(amax, _MXFP8_FLOOR).to(tl.int32, bitcast=True)
    else:
        magnitude = bits & ABS_BITS
        finite = magnitude < INF_BITS
        # Positive floats order like their bits.
        amax = tl.max(tl.max(tl.where(finite, magnitude, 0), axis=3), axis=2)
        amax = _larger_half(amax)
        amax = tl.maximum(amax, _MXFP8_FLOOR_BITS)
    # e + 127 with e the smallest integer such that amax <= 1.75 * 2**8 * 2**e.
    byte = ((amax + 0x1FFFFF) >> 23) - 8
    byte = _for_both_halves(byte)
    factor = _power_of_two(254 - byte)[:, :, None, None]
    if HARDWARE:
        return _hardware_e4m3(clean * factor, x), byte
    else:
        code = _round_codes(tl.abs(x) * factor, 3, 7, 0x7E)
        code = tl.where(finite, code, E4M3_NAN) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8), byte


@triton.jit
def _nvfp4_scale(amax, peak, global_scale, HARDWARE: tl.constexpr):
    """Scale bytes int32 ``[U, R]`` for bits of maxima, their float32 values, and the steps."""
    ratio = tl.div_rn(amax.to(tl.float32, bitcast=True), peak * global_scale)
    byte, value = _nearest_e4m3(ratio, HARDWARE)
    return byte, value, value * global_scale


@triton.jit
def _nvfp4_words(x, amax, whole, global_scale, FOUR: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes int32 ``[U, R, C]``, eight a word, and scale bytes int32 ``[U, R]``.

    Args:
        x: as in `encode`.
        amax, whole: of `_largest`, and whether that is finite.
        FOUR: whether a block's maximum becomes 4 where that errs less.
    """
    byte, scale, exact_step = _nvfp4_scale(amax, 6.0, global_scale, HARDWARE)
    live = whole & (byte > 0)
    step = tl.where(live, exact_step, 1.0)
    if FOUR:
        byte4, scale4, exact_step4 = _nvfp4_scale(amax, 4.0, global_scale, HARDWARE)
        live4 = whole & (byte4 > 0)
        step4 = tl.where(live4, exact_step4, 1.0)
    else:
        step4 = step
    if not INTERPRETED:
        # Where steps are tiny, raise all, or remainders would underflow. A step of 0.0 must
        # send all but zeros to the largest code.
        while global_scale < _TINY:
            global_scale *= _RAISE
            x *= _RAISE
            step = tl.maximum(step * _RAISE, _LEAST_STEP)
            if FOUR:
                step4 = tl.maximum(step4 * _RAISE, _LEAST_STEP)
    signed, value, code = even_codes(x, step)
    if FOUR:
        _, value4, code4 = even_codes(x, step4)
        less = squared_error(value4, code4) * (scale4 * scale4) < squared_error(value, code) * (
            scale * scale
        )
        four = live4 & (exact_step4 > 0) & ((exact_step == 0) | less)
        byte = tl.where(four, byte4, byte)
        live = tl.where(four, live4, live)
        code = tl.where(tl.broadcast_to(four[:, :, None, None], code.shape), code4, code)
    word = tl.where(live[:, :, None], signed_words(signed, code), 0)
    return word, tl.where(whole, byte, E4M3_NAN)


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
        # E2M1 has no NaN: one non-finite element makes its block's scale NaN.
        amax = _largest(x)  # [U, R]
        if SIDE.block == 32:
            amax = _for_both_halves(_larger_half(amax))
        whole = amax < INF_BITS
        if FMT == "kvfp4":
            # e + 127 with e the smallest integer such that amax <= 1.5 * 2**2 * 2**e.
            byte = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 94)
            factor = _power_of_two(254 - byte)[:, :, None, None]
            word = half_up_words(x, tl.broadcast_to(factor, x.shape))
            word = tl.where(whole[:, :, None], word, 0)
            byte = tl.where(whole, byte, E8M0_NAN)
        elif FMT == "mxfp4":
            # e + 127 with e the exponent of amax less 2; all of that of a subnormal is too small.
            byte = tl.maximum((amax >> 23) - 2, 0)
            factor = _power_of_two(254 - byte)[:, :, None, None]
            word = even_words(x, tl.broadcast_to(factor, x.shape))
            word = tl.where(whole[:, :, None], word, 0)
            byte = tl.where(whole, byte, E8M0_NAN)
        else:
            tl.static_assert(FMT == "nvfp4")
            FOUR: tl.constexpr = SIDE.four_over_six
            word, byte = _nvfp4_words(x, amax, whole, global_scale, FOUR, HARDWARE)
        return word, byte.to(tl.uint8)


@triton.jit
def store_rows(data_ptr, scale_ptr, slot, head, mask, data, scale, SIDE: tl.constexpr):
    """Write what `encode` returned; the arguments are those of `load_rows`.

    Rows in BF16 beside the cache's own format have None for scales.
    """
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
    if SIDE.block > 0 and scale is not None:
        block = unit // (SIDE.block // UNIT)
        p_scale = scale_ptr + scale_offset(slot, head, SIDE)[None, :] + block * SIDE.s_blk
        tl.store(p_scale, scale, mask=m_unit & (unit % (SIDE.block // UNIT) == 0))


@triton.jit
def store_first(first_ptr, slot, head, mask, x, global_scale, SIDE: tl.constexpr):
    """Write rows of the first tokens of pages in BF16, over the global scale.

    Args:
        first_ptr: ``[pages, SIDE.first, heads, dim]`` bfloat16.
        slot, head, mask: as of `store_rows`; x, global_scale: as of `encode`.
    """
    offset = slot % SIDE.page
    mask = mask & (offset < SIDE.first)
    if tl.max(mask.to(tl.int32), 0) > 0:
        if SIDE.fmt == "nvfp4":
            x = tl.div_rn(x, tl.zeros_like(x) + global_scale)
        rows = tl.reshape(round_bf16(x), (x.shape[0], x.shape[1], x.shape[2] * 8))
        place = slot // SIDE.page * SIDE.first + offset
        store_rows(first_ptr, None, place, head, mask, rows, None, SIDE)
