"""Tiles to float16 by the instructions of newer GPUs (SM89 on): the fast half of `codec`.

A row is read as words of 16 bits. One word carries `classes` elements of head_dim: word ``w`` holds
the elements ``classes * w + c``. Decoding gives one float16 tile per class ``c``, so that no
element has to move between lanes; the query is split the same way, and so is the output.

float16 has less range than the formats, so a tile comes out as its value times a fixed power of two
(see `unshift`), and a scale byte outside of the window that float16 holds becomes Inf. Whatever it
multiplies then ends as NaN or Inf in the result, by which a kernel knows that it must do the work
again with the exact `codec`. The same happens for a NaN in the data. Nothing but zero is flushed
silently.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _e8m0(lowest_byte: int, lowest_field: int) -> str:
    """Four E8M0 bytes to float16, two a register, with ``lowest_byte`` at ``lowest_field``.

    Exponent fields end at 31, which is Inf. Bytes below the lowest wrap around and end there, too.
    """
    below = -lowest_byte & 0xFFFF
    most = 31 - lowest_field
    return f"""{{
        .reg .b32 a, b, below, most;
        mov.b32 below, {below << 16 | below:#x}; mov.b32 most, {most << 16 | most:#x};
        prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
        add.u16x2 a, a, below; add.u16x2 b, b, below;
        min.u16x2 a, a, most; min.u16x2 b, b, most;
        mad.lo.u32 $0, a, 1024, {lowest_field << 26 | lowest_field << 10:#x};
        mad.lo.u32 $1, b, 1024, {lowest_field << 26 | lowest_field << 10:#x};
        }}"""


# Both give 2**(e + 6). Over E4M3 e is in [-20, 9]; up to e = 1, a largest value of 896, no value
# overflows. Over E2M1 it is in [-15, 9], so that the smallest code is a float16.
_E4M3_SCALES = tl.constexpr(_e8m0(107, 1))
_E2M1_SCALES = tl.constexpr(_e8m0(112, 6))


@triton.constexpr_function
def classes(codes):
    """Elements of head_dim in one word of 16 bits, by `Format.codes`."""
    return {"bf16": 1, "e4m3-e8m0": 2, "e2m1-e4m3": 4, "e2m1-e8m0": 4}[codes]


@triton.constexpr_function
def unshift(codes):
    """What undoes the power of two by which decoded values are off."""
    powers = {"bf16": 0, "e4m3-e8m0": -6, "e2m1-e4m3": 14, "e2m1-e8m0": 8}
    return 2.0 ** powers[codes]


@triton.jit
def _e4m3(words):
    """int16 words of two E4M3 codes -> float16 of the low and of the high codes, exact."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w; .reg .b16 low, high;
        prmt.b32 w, $2, 0, 0x3120;
        mov.b32 {low, high}, w;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e2m1(words):
    """int16 words of four E2M1 codes -> float16 of codes 0..3 times 2**-14, exact.

    Sign and the three other bits of a code go to the high byte of a float16, two codes of each byte
    at a time; the low bytes are zero.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, odd, even;
        shr.b32 a, $4, 3; and.b32 b, a, 0x0E0E0E0E; lop3.b32 odd, $4, 0x80808080, b, 0xea;
        shl.b32 a, $4, 4; shl.b32 b, $4, 1; and.b32 b, b, 0x0E0E0E0E;
        lop3.b32 even, a, 0x80808080, b, 0xea;
        prmt.b32 $0, even, 0, 0x2404; and.b32 $2, even, 0xFF00FF00;
        prmt.b32 $1, odd, 0, 0x2404; and.b32 $3, odd, 0xFF00FF00;
        }""",
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack(words, CODES: tl.constexpr):
    """Words ``[X, Y]`` -> a tuple of `classes` tiles ``[X, Y]``, without the block scales."""
    if CODES == "bf16":
        return (words,)
    elif CODES == "e4m3-e8m0":
        return _e4m3(words)
    else:
        tl.static_assert(CODES == "e2m1-e4m3" or CODES == "e2m1-e8m0")
        return _e2m1(words)


@triton.jit
def scale_factors(scale, CODES: tl.constexpr):
    """uint8 scale bytes -> float16 factors: the scale times a power of two, Inf if out of range."""
    if CODES == "e4m3-e8m0":
        return tl.inline_asm_elementwise(
            _E4M3_SCALES,
            "=r,=r,r",
            [scale],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif CODES == "e2m1-e8m0":
        return tl.inline_asm_elementwise(
            _E2M1_SCALES,
            "=r,=r,r",
            [scale],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        tl.static_assert(CODES == "e2m1-e4m3")
        return scale.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def multiply(tiles, factor):
    """Every class times the factors of its blocks."""
    if len(tiles) == 2:
        return tiles[0] * factor, tiles[1] * factor
    else:
        tl.static_assert(len(tiles) == 4)
        return tiles[0] * factor, tiles[1] * factor, tiles[2] * factor, tiles[3] * factor


@triton.jit
def exp2(x):
    """2**x, flushing results below the normal range."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
