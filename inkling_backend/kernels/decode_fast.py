"""Decode for GPUs with asynchronous tile loads (SM90 on): the same work, made to keep up with DRAM.

What is different from `decode.py`: operands are swapped (tokens are rows, heads are columns), so a
group of four heads fills half of an 8-wide matrix instruction; tiles come by the tensor memory
accelerator as 16-bit words and become float16 without moving between lanes (`codec_fp16`); one or
two warps a program, many programs an SM.

float16 does not hold everything that the formats do. So this kernel is optimistic: if anything in a
work item, or in dead slots of its last tile, was out of range or not a number, its sums are not
finite. Then it marks the item, and `decode_redo` computes it again, exactly.

A work item is one chunk or one split (`configs.SplitRule`). Sums start anew with every chunk and
are folded in order, as `merge` does it with chunks that were work items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inkling_backend.formats.layout import CacheLayout, SideLayout
from inkling_backend.kernels.arch import ASYNC_TILES_CAPABILITY, Capability, loads_tiles
from inkling_backend.kernels.arguments import examples
from inkling_backend.kernels.codec_fp16 import (
    classes,
    exp2,
    multiply,
    scale_factors,
    unpack,
    unshift,
)
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import (
    CHUNK_TOKENS,
    KernelConfig,
    fast_decode_config,
    persistent_programs,
)
from inkling_backend.kernels.decode import DecodeCall, decode_case
from inkling_backend.kernels.decode_redo import decode_redo, redo_case
from inkling_backend.kernels.first_tokens import first_tokens
from inkling_backend.kernels.launch import places_next, wait_for_previous
from inkling_backend.kernels.plan import load_record
from inkling_backend.kernels.query_rows import query_offset, query_rows, scaled_query, tree_words
from inkling_backend.kernels.tile import fold, normalizer, sees_new, soft_cap, to_dtype


@triton.jit
def _dot(k, q):
    """Sum over the classes of ``k @ q``: ``[N, W] x [W, M] -> [N, M]`` float32."""
    s = tl.dot(k[0], q[0])
    if len(k) > 1:
        s = tl.dot(k[1], q[1], s)
    if len(k) > 2:
        s = tl.dot(k[2], q[2], s)
        s = tl.dot(k[3], q[3], s)
    return s


@triton.jit
def _add(acc, alpha, v, p):
    """Every class: ``acc * alpha + v @ p``, ``[W, N] x [N, M]``."""
    a = alpha[None, :]
    if len(v) == 1:
        return (tl.dot(v[0], p, acc[0] * a),)
    elif len(v) == 2:
        return tl.dot(v[0], p, acc[0] * a), tl.dot(v[1], p, acc[1] * a)
    else:
        return (
            tl.dot(v[0], p, acc[0] * a),
            tl.dot(v[1], p, acc[1] * a),
            tl.dot(v[2], p, acc[2] * a),
            tl.dot(v[3], p, acc[3] * a),
        )


@triton.jit
def _zeros(W: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr):
    zero = tl.zeros([W, M], tl.float32)
    if COUNT == 1:
        return (zero,)
    elif COUNT == 2:
        return zero, zero
    else:
        return zero, zero, zero, zero


@triton.jit
def _all_finite(acc, total):
    """Whether no sum is Inf or NaN."""
    check = total * 0.0
    for i in tl.static_range(len(acc)):
        check += tl.sum(acc[i] * 0.0, 0)
    return tl.sum(check, 0) == 0.0


@triton.jit
def _store(pointer, row, acc, factor, mask, DIM: tl.constexpr):
    """``acc * factor`` to rows ``[M]`` of ``[rows, DIM]``."""
    COUNT: tl.constexpr = len(acc)
    i_w = tl.arange(0, DIM // COUNT)
    p_out = pointer + (row * DIM)[None, :] + i_w[:, None] * COUNT
    for i in tl.static_range(COUNT):
        value = to_dtype(acc[i] * factor[None, :], pointer.dtype.element_ty)
        tl.store(p_out + i, value, mask=mask[None, :])


@triton.jit
def _fold(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """Adds the sums of a chunk to those of the split (`tile.fold`)."""
    top, total, w, w_chunk = fold(top, total, chunk_top, chunk_total)
    a = tl.broadcast_to(w[None, :], acc[0].shape)
    b = w_chunk[None, :]
    if len(acc) == 1:
        return top, total, (tl.fma(acc[0], a, chunk_acc[0] * b),)
    elif len(acc) == 2:
        first = tl.fma(acc[0], a, chunk_acc[0] * b)
        return top, total, (first, tl.fma(acc[1], a, chunk_acc[1] * b))
    else:
        return (
            top,
            total,
            (
                tl.fma(acc[0], a, chunk_acc[0] * b),
                tl.fma(acc[1], a, chunk_acc[1] * b),
                tl.fma(acc[2], a, chunk_acc[2] * b),
                tl.fma(acc[3], a, chunk_acc[3] * b),
            ),
        )


@triton.jit(do_not_specialize=["window"])
def _decode_fast_kernel(
    q_ptr,
    q_scale_ptr,
    q_stride,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_global_ptr,
    v_global_ptr,
    k_first_ptr,
    v_first_ptr,
    page_table_ptr,
    seq_lens_ptr,
    tree_ptr,
    sizes_ptr,
    work_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    failures_ptr,
    out_ptr,
    sm_scale_log2,
    window,
    softcap_log2,
    sinks_ptr,
    k_words,
    v_words,
    MAX_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    wait_for_previous(EARLY)
    tl.static_assert(K.page % BLOCK_N == 0 and K.dim == K.pad and V.dim == V.pad)
    tl.static_assert(CHUNK % BLOCK_N == 0)
    # A field that is a string is a constant for a callee only under a name of its own.
    K_CODES: tl.constexpr = K.codes
    V_CODES: tl.constexpr = V.codes
    CK: tl.constexpr = classes(K_CODES)
    CV: tl.constexpr = classes(V_CODES)
    WK: tl.constexpr = K.dim // CK
    WV: tl.constexpr = V.dim // CV
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    ROWS: tl.constexpr = Q_LEN * K.heads * GROUP
    # Programs side by side take the query tokens that do not fit one of them, of the same K and V.
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    SHARES: tl.constexpr = (Q_LEN + TOKENS - 1) // TOKENS
    i_n = tl.arange(0, BLOCK_N)

    items = tl.load(sizes_ptr) * (K.heads * SHARES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        work = item // (K.heads * SHARES)
        head = item // SHARES % K.heads
        m_m, token, i_g, offset = query_rows(item % SHARES * TOKENS, BLOCK_M, GROUP, Q_LEN, K.heads)
        request, start, end, whole = load_record(work_ptr, work)
        table_ptr = page_table_ptr + request.to(tl.int64) * MAX_PAGES
        row = request.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
        q_at = query_offset(request, head, q_stride, token, i_g, offset, GROUP, Q_LEN, K.dim)
        if K_CODES == "bf16":
            p_q = q_ptr + q_at[None, :] + tl.arange(0, K.dim)[:, None]
            q = (tl.load(p_q, mask=m_m[None, :], other=0.0),)
            scale = tl.zeros([BLOCK_M], tl.float32) + scale_log2
        else:
            q, down = scaled_query(q_ptr, q_scale_ptr, q_at, m_m, QUANTIZED, K.dim, CK)
            scale = down * (scale_log2 * unshift(K_CODES))
        step = scale
        if softcap_log2 is not None:
            step = tl.full([BLOCK_M], 1.0, tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = _zeros(WV, BLOCK_M, CV)
        split_top, split_total, split_acc = top, total, acc
        if Q_LEN > 1 or window is not None:
            newest = tl.load(seq_lens_ptr + request) - Q_LEN
        if tree_ptr is not None:
            tree = tree_words(tree_ptr, request, token, m_m, Q_LEN)
        if window is not None:
            oldest = newest - window
            start = tl.maximum(start, oldest // BLOCK_N * BLOCK_N)
        if K.first > 0:  # noqa: SIM102 - this is decided when compiling
            if start == 0:
                top, total, acc = first_tokens(
                    *(top, total, acc, q, scale, step, k_first_ptr, v_first_ptr),
                    *(tl.load(table_ptr), head, end),
                    newest if Q_LEN > 1 else None,
                    oldest if window is not None else None,
                    token,
                    tree if tree_ptr is not None else None,
                    softcap_log2,
                    Q_LEN=Q_LEN,
                    K=K,
                    V=V,
                )
        for tile in range(start, end, BLOCK_N):
            page = tl.load(table_ptr + tile // K.page)
            first = tl.multiple_of(tile % K.page, BLOCK_N)
            slot = page * K.page + first
            t = first + i_n
            k = unpack(k_words.load([slot, head * WK]), K_CODES)
            if K.block > 0:
                SK: tl.constexpr = K.dim // K.block
                p_scale = k_scale_ptr + (page.to(tl.int64) * K.heads + head) * (K.page * SK)
                p_scale += ((t % 32) * K.s_lo + (t // 32) * K.s_hi)[:, None]
                factor = scale_factors(
                    tl.load(p_scale + (tl.arange(0, SK) * K.s_blk)[None, :]), K_CODES
                )
                factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, SK, WK // SK))
                k = multiply(k, tl.reshape(factor, (BLOCK_N, WK)))
            logits = _dot(k, q)  # [N, M]
            s = logits
            if softcap_log2 is not None:
                s = soft_cap(s, (scale / softcap_log2)[None, :], softcap_log2)
            if Q_LEN == 1:
                if tile + BLOCK_N > end:
                    s = tl.where((tile + i_n < end)[:, None], s, float("-inf"))
                if window is not None:  # noqa: SIM102 - this is decided when compiling
                    if tile < oldest:
                        s = tl.where((tile + i_n >= oldest)[:, None], s, float("-inf"))
            else:
                place = (tile + i_n)[:, None] - token[None, :]  # as the first token sees it
                if tile + BLOCK_N > newest:
                    shown = place <= newest
                    if tree_ptr is not None:
                        shown = sees_new(tree[None, :], (tile + i_n - newest)[:, None])
                    s = tl.where(shown & (tile + i_n < end)[:, None], s, float("-inf"))
                if window is not None:  # noqa: SIM102 - this is decided when compiling
                    if tile < oldest + Q_LEN - 1:
                        s = tl.where(place >= oldest, s, float("-inf"))
            if K.first > 0:  # noqa: SIM102 - this is decided when compiling
                if tile < K.first:
                    s = tl.where((tile + i_n >= K.first)[:, None], s, float("-inf"))
            # Fourteen powers of two of float16 are left above 1: they keep small probabilities.
            new_top = tl.maximum(top, tl.max(s, 0) * step - 14.0)
            base = new_top
            if Q_LEN > 1:
                # A token may see nothing of a tile; 0 keeps -inf minus -inf away.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = exp2(s * step[None, :] - base[None, :])
            alpha = exp2(top - base)
            # Zero times a logit shows that it was out of range: -inf alone would go unnoticed.
            total = total * alpha + tl.sum(tl.fma(logits, 0.0, p), 0)
            v = unpack(v_words.load([slot, head * WV]).T, V_CODES)
            if V.block > 0:
                SV: tl.constexpr = V.dim // V.block
                p_scale = v_scale_ptr + (page.to(tl.int64) * K.heads + head) * (K.page * SV)
                p_scale += ((t % 32) * V.s_lo + (t // 32) * V.s_hi)[None, :]
                factor = scale_factors(
                    tl.load(p_scale + (tl.arange(0, SV) * V.s_blk)[:, None]), V_CODES
                )
                factor = tl.broadcast_to(factor[:, None, :], (SV, WV // SV, BLOCK_N))
                v = multiply(v, tl.reshape(factor, (WV, BLOCK_N)))
            acc = _add(acc, alpha, v, p.to(v[0].dtype))
            top = new_top
            if BLOCK_N == CHUNK or (tile + BLOCK_N) % CHUNK == 0:
                split_top, split_total, split_acc = _fold(
                    split_top, split_total, split_acc, top, total, acc
                )
                top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                acc = _zeros(WV, BLOCK_M, CV)
        # A last chunk that is not whole; after a whole one this changes nothing.
        top, total, acc = _fold(split_top, split_total, split_acc, top, total, acc)

        finite = _all_finite(acc, total)
        tl.atomic_add(failures_ptr, 1, mask=finite == 0, sem="relaxed")
        part = work.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
        tl.store(total_ptr + part, tl.where(finite, total, float("nan")), mask=m_m)
        if whole:
            q_head = head * GROUP + i_g
            factor = normalizer(v_global, top, total, sinks_ptr, q_head) * unshift(V_CODES)
            _store(out_ptr, row, acc, factor, m_m, V.dim)
        else:
            factor = tl.full([BLOCK_M], unshift(V_CODES), tl.float32)
            _store(partial_ptr, part, acc, factor, m_m, V.dim)
            tl.store(top_ptr + part, top, mask=m_m)


def _words(side: SideLayout, data: torch.Tensor, block_n: int) -> TensorDescriptor:
    """A data buffer as words of 16 bits, loaded by ``[block_n, words of one head]``."""
    words = data if data.dtype == torch.bfloat16 else data.view(torch.int16)
    slots, heads, width = words.shape
    return TensorDescriptor(words, [slots, heads * width], [heads * width, 1], [block_n, width])


def config_for(
    layout: CacheLayout,
    group: int,
    q_len: int,
    dtype: torch.dtype,
    capability: Capability | None,
) -> KernelConfig | None:
    """How this kernel serves such a model on such a GPU; None where `decode.decode` must.

    Args:
        group: query heads of one KV head.
        q_len: query tokens of a request.
    """
    config = fast_decode_config(group, q_len, layout)
    fits = (
        capability is not None
        and loads_tiles(capability)
        and {layout.k_head_dim, layout.v_head_dim} <= {64, 128, 256}
        and (layout.k_format.block > 0 or dtype == torch.bfloat16)
    )
    return config if fits and config and layout.page_size % config.block_n == 0 else None


def _constants(config: KernelConfig) -> dict[str, Any]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CHUNK": CHUNK_TOKENS,
    }


def decode_fast(call: DecodeCall) -> None:
    """Does what `decode.decode` does, in two launches, where there is a `config_for` it."""
    layout = call.cache.layout
    config = fast_decode_config(call.group, call.q_len, layout)
    assert config is not None
    _decode_fast_kernel[(persistent_programs(config, call.out.device),)](
        *call.arguments(),
        _words(layout.k, call.cache.k_data, config.block_n),
        _words(layout.v, call.cache.v_data, config.block_n),
        **call.constants(),
        **_constants(config),
        EARLY=places_next(call.out.device, call.batch),
        **config.options,
    )
    decode_redo(call)


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to, over `arguments.examples`."""
    for example in examples():
        layout = example.layout
        dtype = torch.bfloat16 if example.dtype == "bf16" else torch.float16
        config = config_for(layout, example.group, example.q_len, dtype, ASYNC_TILES_CAPABILITY)
        if config is None:
            continue
        sides = (("k_words", layout.k), ("v_words", layout.v))
        words = {
            name: f"tensordesc<{'i16' if side.format.block else 'bf16'}"
            f"[{config.block_n}, {side.head_dim // classes(side.format.codes)}]>"
            for name, side in sides
        }
        constants = _constants(config) | {"EARLY": True}
        case = decode_case(_decode_fast_kernel, example, config, constants, **words)
        for each in (case, redo_case(example)):
            yield replace(each, capability=ASYNC_TILES_CAPABILITY)
