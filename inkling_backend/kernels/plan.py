"""One small launch that turns the engine's view of a batch into page tables and a work list.

Input: ``slot_table [rows, >= max_context]`` int32 (position -> slot), ``rows [B]`` (which of them),
``seq_lens [B]``.
Output, in buffers of the caller: ``page_table [max_batch, max_pages]`` int32 (written up to each
request's length), ``seq_lens [max_batch]`` int32, and for decode ``split_indptr [max_batch + 1]``
int32 (first work item of each request) and ``work [items, 3]`` int32 (request, first token, end).
The grid is one program per request, so a captured launch replays with other lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import SplitRule


@triton.jit
def split_tokens(
    length,
    MIN_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Tokens of one split: `SplitRule.split_tokens` for tensors of lengths."""
    wanted = tl.maximum((length + TARGET - 1) // TARGET, MIN_TOKENS)
    wanted = tl.minimum(wanted, MAX_TOKENS)
    tokens = tl.maximum(wanted, (length + MAX_SPLITS - 1) // MAX_SPLITS)
    return (tokens + STEP - 1) // STEP * STEP


@triton.jit
def count_splits(
    length,
    MIN_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Splits of requests of these lengths; 0 for length 0."""
    tokens = split_tokens(length, MIN_TOKENS, MAX_SPLITS, TARGET, MAX_TOKENS, STEP)
    return (length + tokens - 1) // tokens


@triton.jit
def _load_length(seq_lens_ptr, index, mask, MAX_CONTEXT: tl.constexpr):
    """Lengths as int32; beyond the buffers' size they are cut, so that nothing is overrun."""
    length = tl.load(seq_lens_ptr + index, mask=mask, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(length, 0), MAX_CONTEXT)


@triton.jit(do_not_specialize=["batch", "slot_stride"])
def _plan_kernel(
    slot_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    qo_indptr_ptr,
    page_table_ptr,
    seq_lens_out_ptr,
    qo_indptr_out_ptr,
    split_indptr_ptr,
    work_ptr,
    batch,
    slot_stride,
    PAGE: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    DECODE: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    length = _load_length(seq_lens_ptr, request, True, MAX_CONTEXT)
    tl.store(seq_lens_out_ptr + request, length)

    slots_ptr = slot_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * slot_stride
    pages_ptr = page_table_ptr + request.to(tl.int64) * MAX_PAGES
    pages = (length + PAGE - 1) // PAGE
    for first_page in range(0, pages, BLOCK):
        i_page = first_page + lane
        m_page = i_page < pages
        slot = tl.load(slots_ptr + i_page * PAGE, mask=m_page, other=0)
        # A row of padding may hold anything; page 0 is the one that is always there.
        tl.store(pages_ptr + i_page, tl.maximum(slot, 0) // PAGE, mask=m_page)

    last = request == batch - 1
    if DECODE:
        before = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, request, BLOCK):
            i_other = first + lane
            other = _load_length(seq_lens_ptr, i_other, i_other < request, MAX_CONTEXT)
            before += count_splits(other, MIN_TOKENS, MAX_SPLITS, TARGET, MAX_TOKENS, STEP)
        first_item = tl.sum(before, 0)
        splits = count_splits(length, MIN_TOKENS, MAX_SPLITS, TARGET, MAX_TOKENS, STEP)
        tl.store(split_indptr_ptr + request, first_item)
        tl.store(split_indptr_ptr + batch, first_item + splits, mask=last)
        i_split = tl.arange(0, BLOCK_SPLITS)
        m_split = i_split < splits
        tokens = split_tokens(length, MIN_TOKENS, MAX_SPLITS, TARGET, MAX_TOKENS, STEP)
        start = i_split * tokens
        p_work = work_ptr + (first_item + i_split) * 3
        tl.store(p_work, tl.zeros([BLOCK_SPLITS], tl.int32) + request, mask=m_split)
        tl.store(p_work + 1, start, mask=m_split)
        tl.store(p_work + 2, tl.minimum(start + tokens, length), mask=m_split)
    else:
        start = tl.load(qo_indptr_ptr + request).to(tl.int32)
        end = tl.load(qo_indptr_ptr + request + 1).to(tl.int32)
        tl.store(qo_indptr_out_ptr + request, start)
        tl.store(qo_indptr_out_ptr + batch, end, mask=last)


def _constants(
    page_size: int, max_context: int, max_pages: int, rule: SplitRule | None
) -> dict[str, Any]:
    """Constexprs; without a rule the plan has no work list."""
    return {
        "PAGE": page_size,
        "MAX_CONTEXT": max_context,
        "MAX_PAGES": max_pages,
        "DECODE": rule is not None,
        "MIN_TOKENS": rule.min_tokens if rule else 1,
        "MAX_SPLITS": rule.max_splits if rule else 1,
        "TARGET": rule.target if rule else 1,
        "MAX_TOKENS": rule.max_tokens if rule else 1,
        "STEP": rule.step if rule else 1,
        "BLOCK_SPLITS": triton.next_power_of_2(rule.max_splits) if rule else 1,
        "BLOCK": 1024,
    }


def _launch(slot_table, rows, seq_lens, qo, outputs, *, batch, page_size, max_context, rule):
    page_table, seq_lens_out, qo_out, split_indptr, work = outputs
    _plan_kernel[(batch,)](
        slot_table,
        rows,
        seq_lens,
        qo,
        page_table,
        seq_lens_out,
        qo_out,
        split_indptr,
        work,
        batch,
        slot_table.stride(0),
        **_constants(page_size, max_context, page_table.shape[1], rule),
        num_warps=4,
    )


def plan_decode(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    batch: int,
    page_size: int,
    max_context: int,
    rule: SplitRule,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    split_indptr: torch.Tensor,
    work: torch.Tensor,
) -> None:
    """Fills the decode buffers for the first ``batch`` rows (module docstring); one launch."""
    if batch == 0:
        split_indptr[:1].zero_()
        return
    outputs = (page_table, seq_lens_out, seq_lens_out, split_indptr, work)
    _launch(
        slot_table,
        rows,
        seq_lens,
        rows,
        outputs,
        batch=batch,
        page_size=page_size,
        max_context=max_context,
        rule=rule,
    )


def plan_extend(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    batch: int,
    page_size: int,
    max_context: int,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    qo_indptr_out: torch.Tensor,
) -> None:
    """Fills the extend buffers and copies ``qo_indptr [B + 1]`` into its own; one launch."""
    if batch == 0:
        return
    outputs = (page_table, seq_lens_out, qo_indptr_out, qo_indptr_out, qo_indptr_out)
    _launch(
        slot_table,
        rows,
        seq_lens,
        qo_indptr,
        outputs,
        batch=batch,
        page_size=page_size,
        max_context=max_context,
        rule=None,
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to."""
    rule = SplitRule(256, 32)
    for decode, page, index in ((True, 128, "i64"), (False, 64, "i64"), (True, 32, "i32")):
        names = ("slot_table", "qo_indptr", "page_table", "seq_lens_out", "qo_indptr_out")
        signature = {f"{name}_ptr": "*i32" for name in (*names, "split_indptr", "work")}
        signature |= {"rows_ptr": f"*{index}", "seq_lens_ptr": f"*{index}"}
        signature |= {"batch": "i32", "slot_stride": "i32"}
        yield CompileCase(
            name=f"plan-{'decode' if decode else 'extend'}-p{page}-{index}",
            kernel=_plan_kernel,
            signature=signature,
            constexprs=_constants(page, 131072, 131072 // page, rule if decode else None),
        )
