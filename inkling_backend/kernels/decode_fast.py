"""Decode for GPUs with asynchronous tile loads (SM90 on): the same work, made to keep up with DRAM.

What is different from `decode.py`: operands are swapped (tokens are rows, heads are columns), so a
group of four heads fills half of an 8-wide matrix instruction; tiles come by the tensor memory
accelerator as 16-bit words and become float16 without moving between lanes (`codec_fp16`); one or
two warps a program, many programs an SM.

float16 does not hold everything that the formats do. So a split is computed optimistically; if
anything in it, or in dead slots of its last tile, was out of range or not a number, its sums are
not finite, and it is computed again by the exact path of `decode.py`, to the same accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inkling_backend.formats import Query
from inkling_backend.formats.layout import CacheLayout, LayerCache, SideLayout
from inkling_backend.kernels.arch import ASYNC_TILES_CAPABILITY, Capability, loads_tiles
from inkling_backend.kernels.arguments import (
    cache_arguments,
    cache_constants,
    compile_case,
    examples,
)
from inkling_backend.kernels.codec import load_query, load_query_columns
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
    fast_decode_config,
    persistent_programs,
)
from inkling_backend.kernels.decode import Partial, attend_split, store_split
from inkling_backend.kernels.tile import to_dtype

# Heads and tokens of a tile of the exact path: few, so that it costs the fast one no registers.
# Not 16 tokens: Triton 3.6 then puts the halves of an interleaved V into the wrong columns.
EXACT_M, EXACT_N = 16, 32
# Tokens of a tile; query heads of a group that are worth it.
BLOCK_N, MAX_GROUP = 64, 16


@triton.jit
def _scaled_query(
    q_ptr, q_scale_ptr, row, mask, QUANTIZED: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr
):
    """The group's rows ``[M]`` as float16 classes ``[W, M]``, each row times a power of two.

    A row's largest element comes into [2**13, 2**14), so that what is 2**-38 of it still counts.
    Returns (classes, what undoes the scaling ``[M]``).
    """
    cols = tl.arange(0, D // COUNT) * COUNT
    x0 = load_query_columns(q_ptr, q_scale_ptr, row, mask, cols, QUANTIZED, D)
    x1 = load_query_columns(q_ptr, q_scale_ptr, row, mask, cols + 1, QUANTIZED, D)
    amax = tl.maximum(tl.max(tl.abs(x0), 0), tl.max(tl.abs(x1), 0))
    if COUNT == 4:
        x2 = load_query_columns(q_ptr, q_scale_ptr, row, mask, cols + 2, QUANTIZED, D)
        x3 = load_query_columns(q_ptr, q_scale_ptr, row, mask, cols + 3, QUANTIZED, D)
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


@triton.jit(do_not_specialize=["batch"])
def _decode_fast_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_global_ptr,
    v_global_ptr,
    k_words,
    v_words,
    page_table_ptr,
    seq_lens_ptr,
    split_indptr_ptr,
    work_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    batch,
    sm_scale_log2,
    MAX_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT_M: tl.constexpr,
    EXACT_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    tl.static_assert(K.page % BLOCK_N == 0 and K.dim == K.pad and V.dim == V.pad)
    # A field that is a string is a constant for a callee only under a name of its own.
    K_FMT: tl.constexpr = K.fmt
    V_FMT: tl.constexpr = V.fmt
    CK: tl.constexpr = classes(K_FMT)
    CV: tl.constexpr = classes(V_FMT)
    WK: tl.constexpr = K.dim // CK
    WV: tl.constexpr = V.dim // CV
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    i_m = tl.arange(0, BLOCK_M)
    m_m = i_m < GROUP
    i_n = tl.arange(0, BLOCK_N)

    items = tl.load(split_indptr_ptr + batch) * K.heads
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        work = item // K.heads
        head = item % K.heads
        request = tl.load(work_ptr + 3 * work)
        start = tl.load(work_ptr + 3 * work + 1)
        end = tl.load(work_ptr + 3 * work + 2)
        table_ptr = page_table_ptr + request.to(tl.int64) * MAX_PAGES
        row = request.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_m  # [M]
        if K_FMT == "bf16":
            p_q = q_ptr + (row * K.dim)[None, :] + tl.arange(0, K.dim)[:, None]
            q = (tl.load(p_q, mask=m_m[None, :], other=0.0),)
            scale = tl.zeros([BLOCK_M], tl.float32) + scale_log2
        else:
            q, down = _scaled_query(q_ptr, q_scale_ptr, row, m_m, QUANTIZED, K.dim, CK)
            scale = down * (scale_log2 * unshift(K_FMT))

        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = _zeros(WV, BLOCK_M, CV)
        for tile in range(start, end, BLOCK_N):
            page = tl.load(table_ptr + tile // K.page)
            first = tl.multiple_of(tile % K.page, BLOCK_N)
            slot = page * K.page + first
            t = first + i_n
            k = unpack(k_words.load([slot, head * WK]), K_FMT)
            if K.block > 0:
                SK: tl.constexpr = K.dim // K.block
                p_scale = k_scale_ptr + (page.to(tl.int64) * K.heads + head) * (K.page * SK)
                p_scale += ((t % 32) * K.s_lo + (t // 32) * K.s_hi)[:, None]
                factor = scale_factors(
                    tl.load(p_scale + (tl.arange(0, SK) * K.s_blk)[None, :]), K_FMT
                )
                factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, SK, WK // SK))
                k = multiply(k, tl.reshape(factor, (BLOCK_N, WK)))
            s = _dot(k, q)  # [N, M]
            if tile + BLOCK_N > end:
                s = tl.where((tile + i_n < end)[:, None], s, float("-inf"))
            # Fourteen powers of two of float16 are left above 1: they keep small probabilities.
            new_top = tl.maximum(top, tl.max(s, 0) * scale - 14.0)
            p = exp2(s * scale[None, :] - new_top[None, :])
            alpha = exp2(top - new_top)
            total = total * alpha + tl.sum(p, 0)
            v = unpack(v_words.load([slot, head * WV]).T, V_FMT)
            if V.block > 0:
                SV: tl.constexpr = V.dim // V.block
                p_scale = v_scale_ptr + (page.to(tl.int64) * K.heads + head) * (K.page * SV)
                p_scale += ((t % 32) * V.s_lo + (t // 32) * V.s_hi)[None, :]
                factor = scale_factors(
                    tl.load(p_scale + (tl.arange(0, SV) * V.s_blk)[:, None]), V_FMT
                )
                factor = tl.broadcast_to(factor[:, None, :], (SV, WV // SV, BLOCK_N))
                v = multiply(v, tl.reshape(factor, (WV, BLOCK_N)))
            acc = _add(acc, alpha, v, p.to(v[0].dtype))
            top = new_top

        part = work.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_m  # [M]
        finished = (start == 0) & (end == tl.load(seq_lens_ptr + request))
        if _all_finite(acc, total):
            factor_v = v_global * unshift(V_FMT)
            if finished:
                _store(out_ptr, row, acc, factor_v / total, m_m, V.dim)
            else:
                factors = tl.zeros([BLOCK_M], tl.float32) + factor_v
                _store(partial_ptr, part, acc, factors, m_m, V.dim)
                tl.store(top_ptr + part, top, mask=m_m)
                tl.store(total_ptr + part, total, mask=m_m)
        else:
            # Rows of at least sixteen heads, as the exact path's matrix instruction wants them.
            i_e = tl.arange(0, EXACT_M)
            m_e = i_e < GROUP
            row_e = request.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_e
            q_e = load_query(q_ptr, q_scale_ptr, row_e, m_e, QUANTIZED, K.dim, K.pad)
            exact, row_max, row_sum = attend_split(
                q_e,
                k_ptr,
                k_scale_ptr,
                v_ptr,
                v_scale_ptr,
                table_ptr,
                head,
                start,
                end,
                scale_log2,
                BLOCK_N=EXACT_N,
                K=K,
                V=V,
            )
            store_split(
                partial_ptr,
                top_ptr,
                total_ptr,
                out_ptr,
                row_e,
                work.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_e,
                m_e,
                exact,
                row_max * scale_log2,
                row_sum,
                v_global,
                finished,
                V,
            )


def _words(side: SideLayout, data: torch.Tensor, block_n: int) -> TensorDescriptor:
    """A data buffer as words of 16 bits, loaded by ``[block_n, words of one head]``."""
    words = data if data.dtype == torch.bfloat16 else data.view(torch.int16)
    slots, heads, width = words.shape
    return TensorDescriptor(words, [slots, heads * width], [heads * width, 1], [block_n, width])


def fits(
    layout: CacheLayout, group: int, dtype: torch.dtype, capability: Capability | None
) -> bool:
    """Whether this kernel serves such a model on such a GPU; `decode.decode` serves the others."""
    return (
        capability is not None
        and loads_tiles(capability)
        and group <= MAX_GROUP
        and layout.page_size % BLOCK_N == 0
        and {layout.k_head_dim, layout.v_head_dim} <= {64, 128, 256}
        and (layout.k_format.block > 0 or dtype == torch.bfloat16)
    )


@lru_cache(maxsize=64)
def _constants(layout: CacheLayout, group: int, max_pages: int) -> dict[str, Any]:
    return {
        **cache_constants(layout, group, max_pages),
        "BLOCK_M": max(8, triton.next_power_of_2(group)),
        "BLOCK_N": BLOCK_N,
        "EXACT_M": max(EXACT_M, triton.next_power_of_2(group)),
        "EXACT_N": EXACT_N,
    }


def decode_fast(
    query: Query,
    cache: LayerCache,
    *,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    split_indptr: torch.Tensor,
    work: torch.Tensor,
    batch: int,
    partial: Partial,
    out: torch.Tensor,
    sm_scale: float,
) -> None:
    """Does what `decode.decode` does, with the same arguments, where `fits` says so."""
    layout = cache.layout
    group = query.data.shape[1] // layout.num_kv_heads
    config = fast_decode_config(layout)
    _decode_fast_kernel[(persistent_programs(config, out.device),)](
        *cache_arguments(query, cache),
        _words(layout.k, cache.k_data, BLOCK_N),
        _words(layout.v, cache.v_data, BLOCK_N),
        page_table,
        seq_lens,
        split_indptr,
        work,
        partial.out,
        partial.top,
        partial.total,
        out,
        batch,
        sm_scale * math.log2(math.e),
        QUANTIZED=query.scale is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_constants(layout, group, page_table.shape[1]),
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to, over `arguments.examples`."""
    for example in examples():
        dtype = torch.bfloat16 if example.dtype == "bf16" else torch.float16
        if not fits(example.layout, example.group, dtype, ASYNC_TILES_CAPABILITY):
            continue
        config = fast_decode_config(example.layout)
        sides = (("k_words", example.layout.k), ("v_words", example.layout.v))
        words = {
            name: f"tensordesc<{'i16' if side.format.block else 'bf16'}"
            f"[{BLOCK_N}, {side.head_dim // classes(side.format.name)}]>"
            for name, side in sides
        }
        pointers = ("page_table_ptr", "seq_lens_ptr", "split_indptr_ptr", "work_ptr")
        partials = ("partial_ptr", "top_ptr", "total_ptr")
        signature = {
            **words,
            **dict.fromkeys(pointers, "*i32"),
            **dict.fromkeys(partials, "*fp32"),
            "out_ptr": f"*{example.dtype}",
            "batch": "i32",
            "sm_scale_log2": "fp32",
        }
        constants = _constants(example.layout, example.group, 1024)
        case = compile_case(_decode_fast_kernel, example, signature, constants, config)
        # A warp has at most 255 registers; where the fast path fills them, the exact one spills.
        yield replace(case, capability=ASYNC_TILES_CAPABILITY, spill_bytes=128)
