"""Number formats inside kernels: codes to tiles, exact to the bit; `encode` is the way back.

The two and `codec_fp16` are the only Triton code that knows what a bit means. Everything here is
integer and float32 arithmetic, so that every architecture and the interpreter agree with
`inkling_backend.formats`.

A `Side` says what a row looks like. Tiles are ``side.pad`` wide; columns from ``side.dim`` on are
zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Whether Triton interprets. Then float32 -> bfloat16 truncates, where the hardware rounds to
# nearest even, and there is no bfloat16 arithmetic.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

INF_BITS = tl.constexpr(0x7F800000)
ABS_BITS = tl.constexpr(0x7FFFFFFF)
E8M0_NAN = tl.constexpr(0xFF)
E4M3_NAN = tl.constexpr(0x7F)


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
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & ABS_BITS
        return (bits | sign).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_bf16(x):
    """float32 to bfloat16 by bits, nearest even; NaN stays NaN and keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    nan = (bits & ABS_BITS) > INF_BITS
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    bits = tl.where(nan, bits | 0x00400000, rounded)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x):
    """float32 to bfloat16, nearest even, with one conversion where there is hardware for it."""
    if INTERPRETED:
        return round_bf16(x)
    else:
        return x.to(tl.bfloat16)


# ------------------------------------------------------------------------------------------ decode
@triton.jit
def _e8m0_value(byte):
    """float32 value of E8M0 bytes: ``2**(byte - 127)``, NaN for 0xFF."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2**-127 is subnormal
    bits = tl.where(byte == E8M0_NAN, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """float32 value of E4M3 (fn) codes, uint8."""
    wide = code.to(tl.int8, bitcast=True).to(tl.int32)
    # Sign to bit 31, exponent and mantissa to bits 26..20: the value times 2**-120, which is
    # subnormal exactly where the code is.
    bits = (wide << 20) & -0x78100000
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    nan = (wide & 0x7F) == E4M3_NAN
    bits = tl.where(nan, bits | 0x7FC00000, value.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_value(code):
    """float32 value of E2M1 codes in the low four bits of an int32; other bits are ignored."""
    bits = ((code << 28) & -0x80000000) | ((code & 7) << 22)  # the value times 2**-126
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _scale_value(byte, CODES: tl.constexpr):
    """float32 value of scale bytes."""
    if CODES == "e2m1-e4m3":
        return e4m3_value(byte)
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
def scale_offset(slot, head, SIDE: tl.constexpr):
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
    CODES: tl.constexpr = SIDE.codes
    D: tl.constexpr = SIDE.dim
    D_PAD: tl.constexpr = SIDE.pad
    row = slot * SIDE.heads + head  # [N]
    if CODES == "bf16":
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
        s_row = scale_offset(slot, head, SIDE)
        p_scale = scale_ptr + s_row[:, None] + (blocks * SIDE.s_blk)[None, :]
        scale = tl.load(p_scale, mask=_row_mask(mask, blocks, SF, SB), other=0)
        scale = _scale_value(scale, CODES)  # [N, SB]
        if CODES == "e4m3-e8m0":
            cols = tl.arange(0, D_PAD)
            p_data = data_ptr + (row * D)[:, None] + cols[None, :]
            code = tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0)
            return _scaled(e4m3_value(code), scale, N, SB, BLOCK, WIDE)
        else:
            tl.static_assert(CODES == "e2m1-e4m3" or CODES == "e2m1-e8m0")
            HALF: tl.constexpr = D_PAD // 2
            cols = tl.arange(0, HALF)
            p_data = data_ptr + (row * (D // 2))[:, None] + cols[None, :]
            pair = tl.load(p_data, mask=_row_mask(mask, cols, D // 2, HALF), other=0)
            pair = pair.to(tl.int32)  # [N, HALF]
            even = _scaled(_e2m1_value(pair), scale, N, SB, BLOCK // 2, WIDE)
            odd = _scaled(_e2m1_value(pair >> 4), scale, N, SB, BLOCK // 2, WIDE)
            return tl.interleave(even, odd)


@triton.jit
def load_tokens(data_ptr, scale_ptr, first_ptr, tile, pos, slot, head, mask, SIDE: tl.constexpr):
    """`load_rows` of neighbours in a request, sink tokens from their rows in BF16.

    Args:
        first_ptr: ``[pages, SIDE.first, heads, dim]`` bfloat16, None without sink tokens.
        tile, pos: position of the first token, a scalar, and of every token ``[N]``.
    """
    x = load_rows(data_ptr, scale_ptr, slot, head, mask, SIDE)
    if SIDE.first > 0:  # noqa: SIM102 - this is decided when compiling
        if tile < SIDE.first:
            cols = tl.arange(0, SIDE.pad)
            row = (slot // SIDE.page * SIDE.first + pos) * SIDE.heads + head
            p_first = first_ptr + (row * SIDE.dim)[:, None] + cols[None, :]
            kept = pos < SIDE.first
            m_first = _row_mask(mask & kept, cols, SIDE.dim, SIDE.pad)
            x = tl.where(kept[:, None], tl.load(p_first, mask=m_first, other=0.0), x)
    return x


@triton.jit
def load_query(
    data_ptr,
    scale_ptr,
    offset,
    mask,
    QUANTIZED: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Query rows, decoded.

    Args:
        data_ptr: ``Query.data``: bfloat16 or float16, or uint8 E4M3 codes if QUANTIZED.
        scale_ptr: ``Query.scale``, uint8 E8M0; any pointer if not QUANTIZED.
        offset: ``[M]`` int64, place of each row's first element; rows in MXFP8 are dense.
        mask: ``[M]`` bool; a row outside is zero and none of its bytes is read.

    Returns:
        ``[M, D_PAD]`` in the query's own dtype, or bfloat16 (exact) if QUANTIZED.
    """
    cols = tl.arange(0, D_PAD)
    p_data = data_ptr + offset[:, None] + cols[None, :]
    if QUANTIZED:
        M: tl.constexpr = offset.shape[0]
        SB: tl.constexpr = D_PAD // 32
        blocks = tl.arange(0, SB)
        p_scale = scale_ptr + (offset >> 5)[:, None] + blocks[None, :]
        scale = tl.load(p_scale, mask=_row_mask(mask, blocks, D // 32, SB), other=0)
        code = tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0)
        return _scaled(e4m3_value(code), _e8m0_value(scale), M, SB, 32, False)
    else:
        return tl.load(p_data, mask=_row_mask(mask, cols, D, D_PAD), other=0.0)


@triton.jit
def load_query_columns(data_ptr, scale_ptr, offset, mask, cols, QUANTIZED: tl.constexpr):
    """Some columns of query rows, transposed, in float32; the arguments are those of `load_query`.

    Args:
        cols: ``[C]`` int32, columns of the row.

    Returns:
        ``[C, M]`` float32, exact.
    """
    x = tl.load(data_ptr + offset[None, :] + cols[:, None], mask=mask[None, :], other=0)
    if QUANTIZED:
        p_scale = scale_ptr + (offset >> 5)[None, :] + (cols // 32)[:, None]
        return e4m3_value(x) * _e8m0_value(tl.load(p_scale, mask=mask[None, :], other=0))
    else:
        return to_float32(x)
