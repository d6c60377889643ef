"""Sink tokens in `decode_fast`: a request's first tokens, from their rows in BF16, one by one.

Their rows go through no float16: products and sums are float32, so that nothing is out of range
that is a number. `codec.load_tokens` is how other kernels read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_backend.kernels.codec import to_float32
from inkling_backend.kernels.codec_fp16 import exp2, unshift
from inkling_backend.kernels.tile import sees_new, soft_cap


@triton.jit
def _elements(row_ptr, live, factor, W: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    """One class of a row in BF16 (`codec_fp16`), times ``factor``: ``[W, 1]`` float32."""
    x = tl.load(
        row_ptr + tl.arange(0, W) * COUNT + C, mask=tl.zeros([W], tl.int1) | live, other=0.0
    )
    return (to_float32(x) * factor)[:, None]


@triton.jit
def _logits(q, row_ptr, live, factor):
    """Sum over the classes of ``q [W, M]`` times a row: ``[M]`` float32."""
    COUNT: tl.constexpr = len(q)
    W: tl.constexpr = q[0].shape[0]
    s = tl.zeros([q[0].shape[1]], tl.float32)
    for c in tl.static_range(COUNT):
        s += tl.sum(q[c].to(tl.float32) * _elements(row_ptr, live, factor, W, COUNT, c), 0)
    return s


@triton.jit
def _add_row(acc, alpha, p, row_ptr, live, factor):
    """Every class: ``acc * alpha + row * p``, ``[W, M]``."""
    COUNT: tl.constexpr = len(acc)
    W: tl.constexpr = acc[0].shape[0]
    a = tl.broadcast_to(alpha[None, :], acc[0].shape)
    b = p[None, :]
    v0 = _elements(row_ptr, live, factor, W, COUNT, 0) * b
    v1 = _elements(row_ptr, live, factor, W, COUNT, 1) * b
    if COUNT == 2:
        return tl.fma(acc[0], a, v0), tl.fma(acc[1], a, v1)
    else:
        tl.static_assert(COUNT == 4)
        v2 = _elements(row_ptr, live, factor, W, COUNT, 2) * b
        v3 = _elements(row_ptr, live, factor, W, COUNT, 3) * b
        return (
            tl.fma(acc[0], a, v0),
            tl.fma(acc[1], a, v1),
            tl.fma(acc[2], a, v2),
            tl.fma(acc[3], a, v3),
        )


@triton.jit
def first_tokens(
    top,
    total,
    acc,
    q,
    scale,
    step,
    k_first_ptr,
    v_first_ptr,
    page,
    head,
    length,
    newest,
    oldest,
    token,
    tree,
    softcap_log2,
    Q_LEN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Adds a request's sink tokens to the sums of its first chunk, which are as `decode_fast` keeps
    them: in the same units, relative to a ``top`` 14 powers of two below the largest logit.

    Args:
        top, total: ``[M]``; acc: classes ``[W, M]``.
        q: classes ``[W, M]`` float16; scale, step: ``[M]``, from a sum of products to a logit, and
            from what the soft-cap leaves to a power of two.
        page: the request's first.
        length: sink tokens from this position on are not there.
        newest, oldest: last and first position that the first query token sees; None where every
            row sees all that are there.
        token, tree: ``[M]``, as in `decode.attend_split`.

    Returns:
        The new (top, total, acc).
    """
    K_CODES: tl.constexpr = K.codes
    V_CODES: tl.constexpr = V.codes
    FIRST: tl.constexpr = K.first
    for i in tl.static_range(FIRST):
        row = (page.to(tl.int64) * FIRST + i) * K.heads + head
        live = i < length
        logits = _logits(q, k_first_ptr + row * K.dim, live, 1.0 / unshift(K_CODES))
        s = logits
        if softcap_log2 is not None:
            s = soft_cap(s, scale / softcap_log2, softcap_log2)
        seen = (token >= 0) & live
        if Q_LEN > 1:
            if tree is None:
                seen = seen & (i - token <= newest)
            else:
                seen = seen & sees_new(tree, i - newest)
        if oldest is not None:
            seen = seen & (i - token >= oldest)
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, s * step - 14.0)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = exp2(s * step - base)
        alpha = exp2(top - base)
        # As with tiles: an infinite logit must not go unnoticed.
        total = total * alpha + tl.fma(logits, 0.0, p)
        acc = _add_row(acc, alpha, p, v_first_ptr + row * V.dim, live, 1.0 / unshift(V_CODES))
        top = new_top
    return top, total, acc
