"""Decode: one new token per request against the paged, block-scaled cache.

A persistent grid of fixed size walks the work list of `plan.py`. One program takes one work item
(request, split) and one KV head, with all query heads of its group as rows, and reads K and V as
they are stored. A request of one split is finished here; the others leave a partial result for
`merge.py`. Nothing a program computes depends on which other requests there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inkling_backend.formats import Query
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.arguments import (
    cache_arguments,
    cache_constants,
    compile_case,
    examples,
)
from inkling_backend.kernels.codec import load_query, load_rows
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import (
    KernelConfig,
    decode_config,
    persistent_programs,
)
from inkling_backend.kernels.tile import (
    raw_logits,
    softmax_step,
    tile_slots,
    to_dtype,
)


class Partial(NamedTuple):
    """Partial results of work items.

    out: ``[items, Hq, Dv]`` float32, sum of the rows of V times their exponentials.
    top: ``[items, Hq]`` float32, the largest logit, to base 2; -inf if the item has none.
    total: ``[items, Hq]`` float32, sum of the exponentials of two, relative to ``top``.
    """

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor


@triton.jit
def attend_split(
    q,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    table_ptr,
    head,
    start,
    end,
    scale_log2,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Attention of one group's rows over the tokens ``start`` to ``end`` of one request.

    Args:
        q: ``[M, K.pad]``, the group's query heads.
        table_ptr: the request's page table.

    Returns:
        (acc ``[M, V.pad]``, row_max ``[M]``, row_sum ``[M]``) as `tile.softmax_step` keeps them.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    V_PAD: tl.constexpr = V.pad
    acc = tl.zeros([BLOCK_M, V_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for tile in range(start, end, BLOCK_N):
        _pos, slot, live = tile_slots(table_ptr, tile, end, K.page, BLOCK_N)
        k = load_rows(k_ptr, k_scale_ptr, slot, head, live, K)  # [N, DK]
        logits = tl.where(live[None, :], raw_logits(q, k), float("-inf"))
        v = load_rows(v_ptr, v_scale_ptr, slot, head, live, V)  # [N, DV]
        acc, row_max, row_sum = softmax_step(logits, v, acc, row_max, row_sum, scale_log2)
    return acc, row_max, row_sum


@triton.jit
def store_split(
    partial_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    row,
    part,
    m_row,
    acc,
    top,
    total,
    v_global,
    finished,
    V: tl.constexpr,
):
    """Result of a split: the output if ``finished``, else the partial result.

    Args:
        row, part: ``[M]`` int64, rows of the output and of the partial results.
        top: ``[M]``, the largest logit to base 2.
    """
    i_d = tl.arange(0, V.pad)
    m_out = m_row[:, None] & (i_d < V.dim)[None, :]
    if finished:
        # A sum of zero: every logit was -inf.
        norm = v_global / tl.where(total == 0.0, 1.0, total)
        result = to_dtype(acc * norm[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * V.dim + i_d[None, :], result, mask=m_out)
    else:
        tl.store(partial_ptr + part[:, None] * V.dim + i_d[None, :], acc * v_global, mask=m_out)
        tl.store(top_ptr + part, top, mask=m_row)
        tl.store(total_ptr + part, total, mask=m_row)


@triton.jit(do_not_specialize=["batch"])
def _decode_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_global_ptr,
    v_global_ptr,
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
    K: tl.constexpr,
    V: tl.constexpr,
):
    tl.static_assert(GROUP <= BLOCK_M)
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    i_m = tl.arange(0, BLOCK_M)
    m_m = i_m < GROUP

    items = tl.load(split_indptr_ptr + batch) * K.heads
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # Neighbouring programs take neighbouring heads of the same tokens.
        work = item // K.heads
        head = item % K.heads
        request = tl.load(work_ptr + 3 * work)
        start = tl.load(work_ptr + 3 * work + 1)
        end = tl.load(work_ptr + 3 * work + 2)
        row = request.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_m  # [M]
        q = load_query(q_ptr, q_scale_ptr, row, m_m, QUANTIZED, K.dim, K.pad)
        acc, row_max, row_sum = attend_split(
            q,
            k_ptr,
            k_scale_ptr,
            v_ptr,
            v_scale_ptr,
            page_table_ptr + request.to(tl.int64) * MAX_PAGES,
            head,
            start,
            end,
            scale_log2,
            BLOCK_N=BLOCK_N,
            K=K,
            V=V,
        )
        part = work.to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_m  # [M]
        store_split(
            partial_ptr,
            top_ptr,
            total_ptr,
            out_ptr,
            row,
            part,
            m_m,
            acc,
            row_max * scale_log2,
            row_sum,
            v_global,
            (start == 0) & (end == tl.load(seq_lens_ptr + request)),
            V,
        )


def _constants(
    layout: CacheLayout, group: int, max_pages: int, config: KernelConfig
) -> dict[str, Any]:
    return {
        **cache_constants(layout, group, max_pages),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }


def decode(
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
    """Attention of ``batch`` single-token requests; one launch, graph-capturable.

    Args:
        query: ``[B, Hq, Dk]``.
        page_table, seq_lens, split_indptr, work: as `plan.plan_decode` left them.
        partial: receives the parts of requests of several splits; `merge.merge` finishes them.
        out: ``[B, Hq, Dv]`` bfloat16 or float16; written for requests of exactly one split.
        sm_scale: positive.
    """
    layout = cache.layout
    group = query.data.shape[1] // layout.num_kv_heads
    config = decode_config(group, layout)
    _decode_kernel[(persistent_programs(config, out.device),)](
        *cache_arguments(query, cache),
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
        **_constants(layout, group, page_table.shape[1], config),
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to, over `arguments.examples`."""
    for example in examples():
        layout, group = example.layout, example.group
        config = decode_config(group, layout)
        signature = {
            **dict.fromkeys(("page_table_ptr", "seq_lens_ptr"), "*i32"),
            **dict.fromkeys(("split_indptr_ptr", "work_ptr"), "*i32"),
            **dict.fromkeys(("partial_ptr", "top_ptr", "total_ptr"), "*fp32"),
            "out_ptr": f"*{example.dtype}",
            "batch": "i32",
            "sm_scale_log2": "fp32",
        }
        constants = _constants(layout, group, 1024, config)
        yield compile_case(_decode_kernel, example, signature, constants, config)
