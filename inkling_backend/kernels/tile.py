"""One step of attention over one KV tile: what decode and extend share.

Every operation on a row is written so that its bits depend on that row alone: no multiplication
feeds an addition that a compiler could fuse in one kernel variant and not in another, and a tile in
which a row sees nothing leaves that row exactly as it was.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from inkling_backend.kernels.codec import INTERPRETED, to_bf16, to_float32

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """float32 to the model's dtype, bfloat16 or float16."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(dtype)


@triton.jit
def finite(x):
    """Elementwise: neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` with bfloat16 operands and float32 sums (the interpreter has no bfloat16)."""
    if INTERPRETED:
        return tl.dot(to_float32(a), to_float32(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def tile_slots(table_ptr, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens of a tile are.

    Args:
        table_ptr: int32 page table of the request.
        start: position of the tile's first token, a multiple of BLOCK, below ``end``.
        end: first position that must not be read.

    Returns:
        (position int32 ``[N]``, slot int64 ``[N]``, live bool ``[N]``).
    """
    i_n = tl.arange(0, BLOCK)
    pos = start + i_n
    live = pos < end
    if PAGE % BLOCK == 0:
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        slot = page * PAGE + (start % PAGE + i_n)
    else:
        page = tl.load(table_ptr + pos // PAGE, mask=live, other=0).to(tl.int64)
        slot = page * PAGE + pos % PAGE
    return pos, slot, live


@triton.jit
def sees_new(words, index):
    """Whether rows of these words (bit j: sees the new token j) see a new token; all see old ones.

    Args:
        words: int32 or int64; index: of the new token, negative for older ones. They broadcast.
    """
    last: tl.constexpr = words.dtype.primitive_bitwidth - 1
    shift = tl.minimum(tl.maximum(index, 0), last).to(words.dtype)
    return (index < 0) | (((words >> shift) & 1) != 0)


@triton.jit
def raw_logits(q, k):
    """``q @ k^T`` in float32, without any scale. q ``[M, D]``, k ``[N, D]`` -> ``[M, N]``.

    K is bfloat16, exactly, and its range exceeds float16. So a float16 query is cut into two
    bfloat16 parts whose sum it is (11 = 8 + 3 significant bits), and both are multiplied.
    """
    k_t = tl.trans(k)
    zero = tl.zeros([q.shape[0], k.shape[0]], dtype=tl.float32)
    if q.dtype == tl.float16:
        exact = to_float32(q)
        high = to_bf16(exact)
        low = to_bf16(exact - to_float32(high))
        return dot(high, k_t, dot(low, k_t, zero))
    else:
        return dot(q, k_t, zero)


@triton.jit
def soft_cap(logits, factor, cap):
    """``cap * tanh(logits * factor)`` in float32, within a few units in the last place.

    Ends at ``cap`` for an infinite logit; NaN stays NaN.
    """
    x = logits * factor
    size = tl.abs(x)
    # Near zero the difference below has no digits left, and a large cap would show that.
    square = x * x
    series = tl.fma(square, tl.fma(square, 62.0 / 2835.0, -17.0 / 315.0), 2.0 / 15.0)
    near = tl.fma(x * square, tl.fma(square, series, -1.0 / 3.0), x)
    far = 1.0 - 2.0 / (tl.math.exp2(size * (2.0 * LOG2E)) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    # A sum that is a product alone: no compiler takes it into the next subtraction.
    return tl.fma(tl.where(size < 0.25, near, far), cap, 0.0)


@triton.jit
def bias_rows(bias_ptr, row_stride, head_stride, row, q_head, m_row):
    """Where the biases of rows begin, ``[M]``; the first row's where ``m_row`` is false."""
    place = row.to(tl.int64) * row_stride + q_head * head_stride
    return bias_ptr + tl.where(m_row, place, 0)


@triton.jit
def add_bias(logits, factor, rows, distance, extent):
    """``logits * factor`` plus a relative bias, to base 2: ``[M, N]`` float32.

    Args:
        rows: `bias_rows`; distance: ``[M, N]``, tokens from each key to the row.
        extent: distances that have a bias; others, and those below 0, have none.
    """
    inside = (distance >= 0) & (distance < extent)
    bias = tl.load(rows[:, None] + distance, mask=inside, other=0.0)
    return tl.fma(logits, factor, tl.fma(to_float32(bias), LOG2E, 0.0))


@triton.jit
def softmax_step(logits, v, acc, row_max, row_sum, scale_log2):
    """Adds one tile to the running sums.

    Args:
        logits: ``[M, N]`` float32, unscaled, -inf where a row must not look.
        v: ``[N, DV]`` bfloat16.
        acc, row_max, row_sum: ``[M, DV]``, ``[M]``, ``[M]`` float32; row_max is unscaled.
        scale_log2: positive factor from a raw logit to an exponent of two.

    Returns:
        The new (acc, row_max, row_sum).
    """
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    # A row that has seen nothing has no maximum; 0 keeps -inf minus -inf away.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2((logits - base[:, None]) * scale_log2)
    alpha = tl.math.exp2((row_max - base) * scale_log2)
    row_sum = tl.fma(row_sum, alpha, tl.sum(p, 1))
    acc = dot(to_bf16(p), v, acc * alpha[:, None])
    return acc, new_max, row_sum


@triton.jit
def fold(top_a, total_a, top_b, total_b):
    """Joins two sums of exponentials; either may be empty (-inf, 0), which changes no bit.

    Sums of V join by the same weights, as ``fma(a, weight_a, b * weight_b)``.

    Args:
        top_a, top_b: the largest logit of each, to base 2.
        total_a, total_b: sums of exponentials of two, relative to it.

    Returns:
        (top, total, weight_a, weight_b).
    """
    top = tl.maximum(top_a, top_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.math.exp2(top_a - base)
    weight_b = tl.math.exp2(top_b - base)
    return top, tl.fma(total_a, weight_a, total_b * weight_b), weight_a, weight_b


@triton.jit
def finite_or_nan(x):
    """x, with infinities made NaN: a sum that took in something infinite says nothing."""
    return tl.where(finite(x), x, float("nan"))


@triton.jit
def mark_seen(acc, seen, v):
    """NaN into acc ``[M, DV]`` where a row sees (``[M, N]``) a non-finite v ``[N, DV]``."""
    hit = to_bf16(tl.where(seen, 1.0, 0.0))
    bad = to_bf16(tl.where(finite(to_float32(v)), 0.0, 1.0))
    hits = dot(hit, bad, tl.zeros([acc.shape[0], acc.shape[1]], dtype=tl.float32))
    return tl.where(hits > 0.0, float("nan"), acc)


@triton.jit
def normalizer(v_global, top, total, sinks_ptr, q_head):
    """What a sum of rows of V is multiplied with, once for each request and query head.

    Args:
        v_global: global scale of V.
        top, total: the sum of exponentials, as `fold` takes it; 0 where every logit was -inf. Then
            the sum of rows is 0, too, and the product NaN, unless there is a sink.
        sinks_ptr: ``[Hq]`` logits that count in the sum and have no value, or None.
        q_head: index of the query head.
    """
    if sinks_ptr is None:
        return v_global / total
    else:
        # A sum that is a product alone, as in `soft_cap`: its bits do not depend on the kernel.
        sink = tl.fma(to_float32(tl.load(sinks_ptr + q_head)), LOG2E, 0.0)
        _top, total, weight, _one = fold(top, total, sink, 1.0)
        return v_global / total * weight
