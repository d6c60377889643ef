"""Number formats inside kernels: tiles to codes and back, exact to the bit.

The only Triton code that knows what a bit means. Everything is integer and float32 arithmetic, so
that every architecture and the interpreter agree with `inkling_backend.formats`.

A `Side` says what a row looks like. Tiles are ``side.pad`` wide; columns from ``side.dim`` on are
zero when read, and what they encode to is not written.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton import knobs

# Whether Triton interprets. Then float32 -> bfloat16 truncates, where the hardware rounds to
# nearest even, and there is no bfloat16 arithmetic.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

_INF_BITS = tl.constexpr(0x7F800000)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_MXFP8_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", 1e-30))[0])
_MXFP8_FLOOR = tl.constexpr(1e-30)
_E8M0_NAN = tl.constexpr(0xFF)
_E4M3_NAN = tl.constexpr(0x7F)
_MAGIC_BITS = tl.constexpr(0x4B400000)  # of 1.5 * 2**23
_TINY = tl.constexpr(2.0**-40)
_RAISE = tl.constexpr(2.0**64)
_LEAST_STEP = tl.constexpr(2.0**-100)
_SIGN_BIT = tl.constexpr(-0x80000000)


# ------------------------------------------------------------------------------------ 16-bit floats
@triton.jit
def to_float32(x):
    """Exact float32 of a float tile: NaN keeps its sign, subnormals keep their value."""
    if x.dtype == tl.bfloat16:
        # By bits: the interpreter mistakes bfloat16 subnormals.
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        # The hardware's conversion may drop the sign of a NaN.
        sign = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16) & -0x80000000
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & _ABS_BITS
        return (bits | sign).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _round_bf16(x):
    """float32 to bfloat16 by bits, nearest even; NaN stays NaN and keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    nan = (bits & _ABS_BITS) > _INF_BITS
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    bits = tl.where(nan, bits | 0x00400000, rounded)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x):
    """float32 to bfloat16, nearest even, with one conversion where there is hardware for it."""
    if INTERPRETED:
        return _round_bf16(x)
    else:
        return x.to(tl.bfloat16)


# ------------------------------------------------------------------------------------------ decode
@triton.jit
def _e8m0_value(byte):
    """float32 value of E8M0 bytes: ``2**(byte - 127)``, NaN for 0xFF."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2**-127 is subnormal
    bits = tl.where(byte == _E8M0_NAN, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_value(code):
    """float32 value of E4M3 (fn) codes, uint8."""
    wide = code.to(tl.int8, bitcast=True).to(tl.int32)
    # Sign to bit 31, exponent and mantissa to bits 26..20: the value times 2**-120, which is
    # subnormal exactly where the code is.
    bits = (wide << 20) & -0x78100000
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    nan = (wide & 0x7F) == _E4M3_NAN
    bits = tl.where(nan, bits | 0x7FC00000, value.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_value(code):
    """float32 value of E2M1 codes in the low four bits of an int32; other bits are ignored."""
    bits = ((code << 28) & -0x80000000) | ((code & 7) << 22)  # the value times 2**-126
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _scale_value(byte, FMT: tl.constexpr):
    """float32 value of scale bytes."""
    if FMT == "nvfp4":
        return _e4m3_value(byte)
    else:
        return _e8m0_value(byte)


@triton.jit
def _scaled(
    value, scale, N: tl.constexpr, SB: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr
):
    """``value [N, SB * STEP] * scale [N, SB]``, each scale over STEP columns.

    float32 if WIDE, else bfloat16.
    """
    value = tl.reshape(value, (N, SB, STEP)) * scale[:, :, None]
    value = tl.reshape(value, (N, SB * STEP))
    if WIDE:
        return value
    else:
        return to_bf16(value)


# -------------------------------------------------------------------------------------- addressing
@triton.jit
def _row_mask(mask, cols, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """``[N, WIDTH]`` mask of the rows' first LIMIT columns."""
    if LIMIT == WIDTH:
        return mask[:, None] & (cols >= 0)[None, :]
    else:
        return mask[:, None] & (cols < LIMIT)[None, :]


@triton.jit
def _scale_offset(slot, head, SIDE: tl.constexpr):
    """``[N]`` int64: bytes from the scale buffer to the first of a row's scale bytes."""
    tl.static_assert(SIDE.page & (SIDE.page - 1) == 0)
    SF: tl.constexpr = SIDE.dim // SIDE.block
    t = slot & (SIDE.page - 1)
    # (page * heads + head) * PAGE * SF without a division: slot - t is page * PAGE.
    base = ((slot - t) * SIDE.heads + head * SIDE.page) * SF
    return base + (t & 31) * SIDE.s_lo + (t >> 5) * SIDE.s_hi


@triton.jit
def load_rows(
    data_ptr, scale_ptr, slot, head, mask, SIDE: tl.constexpr, WIDE: tl.constexpr = False
):
    """Rows of one side of the cache, decoded without the global scale.

    Args:
        data_ptr: the data buffer, ``[slots, heads, row items]`` uint8 or bfloat16.
        scale_ptr: the scale buffer, ``[pages, heads, page * blocks]`` uint8; any pointer for bf16.
        slot: ``[N]`` int64.
        head: a scalar, or ``[N]``.
        mask: ``[N]`` bool; a row outside is zero and none of its bytes is read.
        SIDE: a `Side`.
        WIDE: float32 instead of bfloat16.

    Returns:
        ``[N, side.pad]`` bfloat16 in natural element order. Exact where bfloat16 holds a product of
        code and scale, which is everywhere but at subnormal results of scale bytes below 10.
    """
    FMT: tl.constexpr = SIDE.fmt
    D: tl.constexpr = SIDE.dim
    D_PAD: tl.constexpr = SIDE.pad
    row = slot * SIDE.heads + head  # [N]
    if FMT == "bf16":
        cols = tl.arange(0, D_PAD)
        p_data = data_ptr + (row * D)[:, None] + cols[None, :]
        x = tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0.0)
        if WIDE:
            return to_float32(x)
        else:
            return x
    else:
        N: tl.constexpr = slot.shape[0]
        BLOCK: tl.constexpr = SIDE.block
        SF: tl.constexpr = D // BLOCK
        SB: tl.constexpr = D_PAD // BLOCK
        blocks = tl.arange(0, SB)
        s_row = _scale_offset(slot, head, SIDE)
        p_scale = scale_ptr + s_row[:, None] + (blocks * SIDE.s_blk)[None, :]
        scale = tl.load(p_scale, mask=_row_mask(mask, blocks, SF, SB), other=0)
        scale = _scale_value(scale, FMT)  # [N, SB]
        if FMT == "mxfp8":
            cols = tl.arange(0, D_PAD)
            p_data = data_ptr + (row * D)[:, None] + cols[None, :]
            code = tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0)
            return _scaled(_e4m3_value(code), scale, N, SB, BLOCK, WIDE)
        else:
            tl.static_assert(FMT == "nvfp4" or FMT == "kvfp4")
            HALF: tl.constexpr = D_PAD // 2
            cols = tl.arange(0, HALF)
            p_data = data_ptr + (row * (D // 2))[:, None] + cols[None, :]
            pair = tl.load(p_data, mask=_row_mask(mask, cols, D // 2, HALF), other=0)
            pair = pair.to(tl.int32)  # [N, HALF]
            even = _scaled(_e2m1_value(pair), scale, N, SB, BLOCK // 2, WIDE)
            odd = _scaled(_e2m1_value(pair >> 4), scale, N, SB, BLOCK // 2, WIDE)
            return tl.interleave(even, odd)


@triton.jit
def load_query(
    data_ptr,
    scale_ptr,
    row,
    mask,
    QUANTIZED: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Query rows, decoded.

    Args:
        data_ptr: ``Query.data``: bfloat16 or float16, or uint8 E4M3 codes if QUANTIZED.
        scale_ptr: ``Query.scale``, uint8 E8M0; any pointer if not QUANTIZED.
        row: ``[M]`` int64, rows of D elements.
        mask: ``[M]`` bool; a row outside is zero and none of its bytes is read.

    Returns:
        ``[M, D_PAD]`` in the query's own dtype, or bfloat16 (exact) if QUANTIZED.
    """
    cols = tl.arange(0, D_PAD)
    p_data = data_ptr + (row * D)[:, None] + cols[None, :]
    if QUANTIZED:
        M: tl.constexpr = row.shape[0]
        SB: tl.constexpr = D_PAD // 32
        blocks = tl.arange(0, SB)
        p_scale = scale_ptr + (row * (D // 32))[:, None] + blocks[None, :]
        scale = tl.load(p_scale, mask=_row_mask(mask, blocks, D // 32, SB), other=0)
        code = tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0)
        return _scaled(_e4m3_value(code), _e8m0_value(scale), M, SB, 32, False)
    else:
        return tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0.0)


@triton.jit
def load_query_columns(
    data_ptr, scale_ptr, row, mask, cols, QUANTIZED: tl.constexpr, D: tl.constexpr
):
    """Some columns of query rows, transposed, in float32; the arguments are those of `load_query`.

    Args:
        cols: ``[C]`` int32, columns of the row.

    Returns:
        ``[C, M]`` float32, exact.
    """
    x = tl.load(data_ptr + (row * D)[None, :] + cols[:, None], mask=mask[None, :], other=0)
    if QUANTIZED:
        p_scale = scale_ptr + (row * (D // 32))[None, :] + (cols // 32)[:, None]
        return _e4m3_value(x) * _e8m0_value(tl.load(p_scale, mask=mask[None, :], other=0))
    else:
        return to_float32(x)


# ------------------------------------------------------------------------------------------ encode
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
        bits = x.to(tl.int32, bitcast=True) & _ABS_BITS
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
        return code, _e4m3_value(code.to(tl.uint8))


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
        magnitude = bits & _ABS_BITS
        finite = magnitude < _INF_BITS
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
        code = tl.where(finite, code, _E4M3_NAN) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8), byte


@triton.jit
def encode(x, global_scale, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes and scale bytes of a tile of rows.

    Args:
        x: ``[U, R, C, 8]`` float32, from `to_float32`: element ``8 * c + i`` of each unit of
            ``8 * C`` at ``[:, :, c, i]``. A unit is a block, half a
            block (mxfp8) or anything (bf16).
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
        return tl.reshape(_round_bf16(x), (U, R, C * 8)), tl.zeros((U, R), tl.uint8)
    elif FMT == "mxfp8":
        code, byte = _mxfp8_codes(x, HARDWARE)
        return tl.reshape(code, (U, R, C * 8)), byte.to(tl.uint8)
    else:
        tl.static_assert(FMT == "nvfp4" or FMT == "kvfp4")
        # E2M1 has no NaN: one non-finite element makes its block's scale NaN.
        amax = _largest(x)  # [U, R]
        whole = amax < _INF_BITS
        if FMT == "kvfp4":
            # e + 127 with e the smallest integer such that amax <= 1.5 * 2**2 * 2**e.
            byte = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 94)
            factor = _power_of_two(254 - byte)[:, :, None, None]
            word = _half_up_words(x, tl.broadcast_to(factor, x.shape))
            byte = tl.where(whole, byte, _E8M0_NAN)
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
            byte = tl.where(whole, byte, _E4M3_NAN)
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
        p_scale = scale_ptr + _scale_offset(slot, head, SIDE)[None, :] + block * SIDE.s_blk
        tl.store(p_scale, scale, mask=m_unit & (unit % (SIDE.block // UNIT) == 0))
