"""The exact transform of keys and queries inside the store kernel (`inkling_backend.transforms`).

The same operations in the same order as `KeyTransform`, and so the same bits. Tiles are those of
`encode`: ``[U, R, C, 8]``, where the element ``(8 * C * u + 8 * c + i)`` of token r is at
``[u, r, c, i]``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _butterfly(x, STEP: tl.constexpr):
    """``(a + b, a - b)`` of every two elements that lie STEP apart in the tile."""
    PAIRS: tl.constexpr = x.shape[0] * x.shape[1] * x.shape[2] * 8 // (2 * STEP)
    a, b = tl.split(tl.permute(tl.reshape(x, (PAIRS, 2, STEP)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), x.shape)


@triton.jit
def _rotate(x, DIM: tl.constexpr):
    SIZE: tl.constexpr = DIM & -DIM
    UNIT: tl.constexpr = x.shape[2] * 8
    for bit in tl.static_range(0, 8):
        if 2 << bit <= SIZE:
            if 1 << bit < UNIT:
                x = _butterfly(x, 1 << bit)
            else:
                # Tokens lie between the units of a row.
                x = _butterfly(x, (1 << bit) * x.shape[1])
    return x * (SIZE**-0.5)


@triton.jit
def transform(x, center_ptr, head, SIDE: tl.constexpr, ROTATES: tl.constexpr):
    """Rows of one head as `KeyTransform` has them.

    Args:
        x: float32 ``[U, R, C, 8]``.
        center_ptr: float32 ``[heads, dim]``, None for no center.
        SIDE: a `Side`.
        ROTATES: whether rows are multiplied by the Hadamard matrix.
    """
    UNIT: tl.constexpr = x.shape[2] * 8
    if center_ptr is not None:
        unit = tl.arange(0, SIDE.pad // UNIT)[:, None, None, None]
        part = tl.arange(0, UNIT // 8)[None, None, :, None]
        o_d = unit * UNIT + part * 8 + tl.arange(0, 8)[None, None, None, :]
        p_center = center_ptr + head * SIDE.dim + o_d
        x = x - tl.load(p_center, mask=unit < SIDE.dim // UNIT, other=0.0)
    if ROTATES:
        x = _rotate(x, SIDE.dim)
    if center_ptr is not None or ROTATES:
        # Which NaN an addition gives is the hardware's choice.
        x = tl.where(x == x, x, float("nan"))
    return x
