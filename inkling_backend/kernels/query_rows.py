"""The query rows that a program of decode takes: which, where they lie, and as float16."""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_backend.kernels.codec import load_query_columns


@triton.jit
def query_rows(
    first, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr
):
    """The rows of a program: the group of one query token after the other.

    Args:
        first: the first of its query tokens.

    Returns:
        (mask ``[M]``, query token ``[M]``, head within the group ``[M]``, offset ``[M]`` of the row
        from that of the group's first head and token).
    """
    i_m = tl.arange(0, BLOCK_M)
    token = first + i_m // GROUP
    i_g = i_m % GROUP
    offset = i_m
    if Q_LEN > 1:
        offset = token * (HEADS * GROUP) + i_g
    return (token < Q_LEN) & (i_m < BLOCK_M // GROUP * GROUP), token, i_g, offset


@triton.jit
def tree_words(tree_ptr, request, token, mask, Q_LEN: tl.constexpr):
    """Words ``[M]`` of the query rows (`tile.sees_new`), as short as they can be."""
    words = tl.load(tree_ptr + request.to(tl.int64) * Q_LEN + token, mask=mask, other=0)
    if Q_LEN <= 32:
        words = words.to(tl.int32)
    return words


@triton.jit
def query_offset(
    request,
    head,
    q_stride,
    token,
    i_g,
    offset,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    D: tl.constexpr,
):
    """Place ``[M]`` int64 of the first element of each query row.

    Args:
        q_stride: elements from one query token to the next; heads are dense.
        token, i_g, offset: of `query_rows`.
    """
    first = request.to(tl.int64) * Q_LEN * q_stride + head * (GROUP * D)
    if Q_LEN > 1:
        return first + (token * q_stride + i_g * D)
    else:
        return first + offset * D


@triton.jit
def scaled_query(
    q_ptr, q_scale_ptr, place, mask, QUANTIZED: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr
):
    """Rows at ``place [M]`` as float16 classes ``[W, M]``, each row times a power of two.

    A row's largest element comes into [2**13, 2**14), so that what is 2**-38 of it still counts.
    Returns (classes, what undoes the scaling ``[M]``).
    """
    cols = tl.arange(0, D // COUNT) * COUNT
    x0 = load_query_columns(q_ptr, q_scale_ptr, place, mask, cols, QUANTIZED)
    x1 = load_query_columns(q_ptr, q_scale_ptr, place, mask, cols + 1, QUANTIZED)
    amax = tl.maximum(tl.max(tl.abs(x0), 0), tl.max(tl.abs(x1), 0))
    if COUNT == 4:
        x2 = load_query_columns(q_ptr, q_scale_ptr, place, mask, cols + 2, QUANTIZED)
        x3 = load_query_columns(q_ptr, q_scale_ptr, place, mask, cols + 3, QUANTIZED)
        amax = tl.maximum(amax, tl.maximum(tl.max(tl.abs(x2), 0), tl.max(tl.abs(x3), 0)))
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 30)
    up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    down = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    if COUNT == 2:
        return ((x0 * up).to(tl.float16), (x1 * up).to(tl.float16)), down
    else:
        return (
            (x0 * up).to(tl.float16),
            (x1 * up).to(tl.float16),
            (x2 * up).to(tl.float16),
            (x3 * up).to(tl.float16),
        ), down
