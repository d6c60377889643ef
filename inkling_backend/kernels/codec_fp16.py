"""Tiles to float16 by the instructions of newer GPUs (SM89 on): the fast half of `codec`.

A row is read as words of 16 bits. One word carries `classes(FMT)` elements of head_dim: word ``w``
holds the elements ``classes * w + c``. Decoding gives one float16 tile per class ``c``, so that no
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


# Both give 2**(e + 6). MXFP8 takes e in [-20, 9]; up to e = 1, a largest value of 896, no value
# overflows. KVFP4 takes [-15, 9], so that the smallest code is a float16.
_MXFP8_SCALES = tl.constexpr(_e8m0(107, 1))
_KVFP4_SCALES = tl.constexpr(_e8m0(112, 6))


@triton.constexpr_function
def classes(fmt):
    """Elements of head_dim in one word of 16 bits."""
    return {"bf16": 1, "mxfp8": 2, "nvfp4": 4, "kvfp4": 4}[fmt]


@triton.constexpr_function
def unshift(fmt):
    """What undoes the power of two by which decoded values are off."""
    return {"bf16": 1.0, "mxfp8": 2.0**-6, "nvfp4": 2.0**14, "kvfp4": 2.0**8}[fmt]


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
def unpack(words, FMT: tl.constexpr):
    """Words ``[X, Y]`` -> a tuple of `classes` tiles ``[X, Y]``, without the block scales."""
    if FMT == "bf16":
        return (words,)
    elif FMT == "mxfp8":
        return _e4m3(words)
    else:
        tl.static_assert(FMT == "nvfp4" or FMT == "kvfp4")
        return _e2m1(words)


@triton.jit
def scale_factors(scale, FMT: tl.constexpr):
    """uint8 scale bytes -> float16 factors: the scale times a power of two, Inf if out of range."""
    if FMT == "mxfp8":
        return tl.inline_asm_elementwise(
            _MXFP8_SCALES,
            "=r,=r,r",
            [scale],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif FMT == "kvfp4":
        return tl.inline_asm_elementwise(
            _KVFP4_SCALES,
            "=r,=r,r",
            [scale],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        tl.static_assert(FMT == "nvfp4")
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
