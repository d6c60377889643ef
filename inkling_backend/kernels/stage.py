"""Dequantized copies of K and V of some requests, and of queries, for attention that reads BF16.

Global scales stay out of the copies: code times block scale is a bfloat16 number, its product with
a global scale is not. What is not finite in V becomes zero and is marked, because zero times NaN is
NaN: a row that does not see it would get it from an attention that masks probabilities alone. So is
what is so large that a sum of it might overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from inkling_backend.formats import Query
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.arguments import examples
from inkling_backend.kernels.codec import load_query, load_tokens, to_float32
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.side import Side
from inkling_backend.kernels.tile import tile_slots

# A tile is at most a page (32 tokens are the smallest), so that its slots are neighbours.
BLOCK_T = 32
BLOCK_R = 32
# Sums of fewer than 2**27 such elements, times probabilities, are finite.
LARGE = tl.constexpr(2.0**100)


@triton.jit
def _put_rows(out_ptr, x, row, head, live, capacity, SIDE: tl.constexpr):
    """Rows ``x [N, pad]`` of one head to ``out [heads, capacity, dim]``."""
    cols = tl.arange(0, SIDE.pad)
    p_out = out_ptr + ((head * capacity + row) * SIDE.dim)[:, None] + cols[None, :]
    tl.store(p_out, x, mask=live[:, None] & (cols < SIDE.dim)[None, :])


@triton.jit(do_not_specialize=["first", "first_head", "capacity"])
def _stage_kernel(
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_first_ptr,
    v_first_ptr,
    page_table_ptr,
    rows_ptr,
    k_out_ptr,
    v_out_ptr,
    marks_ptr,
    first,
    first_head,
    capacity,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """BLOCK tokens of one head of one request."""
    request = first + tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    length = tl.load(rows_ptr + 2 * request + 1)
    if start >= length:
        return
    i_head = tl.program_id(2).to(tl.int64)
    head = first_head + i_head
    table_ptr = page_table_ptr + request.to(tl.int64) * MAX_PAGES
    pos, slot, live = tile_slots(table_ptr, start, length, K.page, BLOCK)
    row = (tl.load(rows_ptr + 2 * request) + pos).to(tl.int64)
    k = load_tokens(k_ptr, k_scale_ptr, k_first_ptr, start, pos, slot, head, live, K)
    _put_rows(k_out_ptr, k, row, i_head, live, capacity, K)
    v = load_tokens(v_ptr, v_scale_ptr, v_first_ptr, start, pos, slot, head, live, V)
    bad = ~(tl.abs(to_float32(v)) < LARGE)
    v = tl.where(bad, 0.0, v)
    _put_rows(v_out_ptr, v, row, i_head, live, capacity, V)
    if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
        tl.store(marks_ptr + request * V.heads + head, 1)


def stage(
    cache: LayerCache,
    *,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    first: int,
    last: int,
    longest: int,
    first_head: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    marks: torch.Tensor,
) -> None:
    """Copies K and V of the requests ``first`` to ``last`` (exclusive), some heads; one launch.

    Args:
        cache: the layer.
        page_table: as `plan.plan_extend` left it.
        rows: ``[B, 2]`` int32, of each request its first row in the copies and its tokens.
        longest: no request of these has more tokens.
        first_head: the KV head that goes to the first of the copies.
        k_out, v_out: ``[heads, capacity, Dk]``, ``[heads, capacity, Dv]`` bfloat16.
        marks: ``[B, kv heads]`` int32: becomes 1 where V holds something not finite or too large.
    """
    layout = cache.layout
    grid = (triton.cdiv(longest, BLOCK_T), last - first, k_out.shape[0])
    _stage_kernel[grid](
        cache.k_data,
        cache.k_scale,
        cache.v_data,
        cache.v_scale,
        cache.k_first,
        cache.v_first,
        page_table,
        rows,
        k_out,
        v_out,
        marks,
        first,
        first_head,
        k_out.shape[1],
        **_constants(layout, page_table.shape[1]),
        num_warps=4,
    )


def _constants(layout: CacheLayout, max_pages: int) -> dict[str, Any]:
    return {
        "K": Side.of(layout, layout.k),
        "V": Side.of(layout, layout.v),
        "MAX_PAGES": max_pages,
        "BLOCK": BLOCK_T,
    }


@triton.jit(do_not_specialize=["rows"])
def _dequantize_kernel(
    data_ptr, scale_ptr, out_ptr, rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK rows of one query head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    x = load_query(data_ptr, scale_ptr, row * D, mask, True, D, D_PAD)
    cols = tl.arange(0, D_PAD)
    p_out = out_ptr + (row * D)[:, None] + cols[None, :]
    tl.store(p_out, x, mask=mask[:, None] & (cols < D)[None, :])


def dequantize_query(query: Query, out: torch.Tensor) -> None:
    """The first rows of an MXFP8 query, exactly, in bfloat16; one launch.

    Args:
        query: ``[T, query heads, Dk]`` codes and their scales.
        out: ``[N, query heads, Dk]`` bfloat16, contiguous, N at most T.
    """
    rows, dim = out.shape[0] * out.shape[1], out.shape[2]
    _dequantize_kernel[(triton.cdiv(rows, BLOCK_R),)](
        query.data,
        query.scale,
        out,
        rows,
        D=dim,
        D_PAD=triton.next_power_of_2(dim),
        BLOCK=BLOCK_R,
        num_warps=4,
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to: every format, and K and V of two sizes."""
    for example in examples():
        layout = example.layout
        plain = example.dtype == "bf16" and not example.features and example.q_len == 1
        if not plain or layout.v_head_dim != 128:
            continue
        names = ("page_table_ptr", "rows_ptr", "marks_ptr")
        signature = {k: v for k, v in example.signature().items() if k[0] != "q"}
        signature = {k: v for k, v in signature.items() if "global" not in k}
        signature |= dict.fromkeys(names, "*i32") | dict.fromkeys(
            ("first", "first_head", "capacity"), "i32"
        )
        signature |= dict.fromkeys(("k_out_ptr", "v_out_ptr"), "*bf16")
        constants = _constants(layout, 1024)
        constants |= {name: None for name, kind in signature.items() if kind == "constexpr"}
        yield CompileCase(
            f"stage-{example.name}", _stage_kernel, signature, constants, capability=(9, 0)
        )
    for dim in (192, 256):
        signature = {"data_ptr": "*u8", "scale_ptr": "*u8", "out_ptr": "*bf16", "rows": "i32"}
        constants = {"D": dim, "D_PAD": triton.next_power_of_2(dim), "BLOCK": BLOCK_R}
        yield CompileCase(
            f"dequantize-d{dim}", _dequantize_kernel, signature, constants, capability=(9, 0)
        )
