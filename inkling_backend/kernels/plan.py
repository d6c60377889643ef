"""One small launch that turns the engine's view of a batch into page tables and a work list.

Input: ``slot_table [rows, >= max_context]`` int32 (position -> slot), ``rows [B]`` (which of them),
``seq_lens [B]``.
Output, in buffers of the caller: ``page_table [max_batch, max_pages]`` int32 (written up to each
request's length), ``seq_lens [max_batch]`` int32, and for decode a `WorkList`. With `Mapped` there
is a second page table, of the pages of the same tokens in another pool.
The grid is one program per request, so a captured launch replays with other lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import SplitRule


class WorkList(NamedTuple):
    """What decode has to do, on the device; all int32.

    indptr: ``[max_batch + 1]``, first work item of each request; the last one counts all items.
    sizes: ``[2]``: work items, and chunks of a split that has its chunks as work items (1 where
        splits are).
    records: ``[items, 4]``, of each work item (request, first token, end, whether it is all of the
        request).
    """

    indptr: torch.Tensor
    sizes: torch.Tensor
    records: torch.Tensor

    @classmethod
    def empty(cls, items: int, max_batch: int, device: torch.device) -> WorkList:
        """Buffers for so many work items."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(ints(max_batch + 1), ints(2), ints(items, 4))


class Mapped(NamedTuple):
    """Pages of the same tokens in another pool.

    slot_map: ``[slots]`` int32 or int64, slot there of each slot of the slot table; 0: none.
    page_table: ``[max_batch, max_pages]`` int32 to fill; page 0 where there is none.
    """

    slot_map: torch.Tensor
    page_table: torch.Tensor


@triton.jit
def split_tokens(length, RULE: tl.constexpr):
    """Tokens of one split: `SplitRule.split_tokens` for tensors of lengths."""
    tokens = tl.maximum((length + RULE.target - 1) // RULE.target, RULE.min_tokens)
    tokens = tl.minimum(tokens, RULE.max_tokens)
    return (tokens + RULE.step - 1) // RULE.step * RULE.step


@triton.jit
def load_record(work_ptr, item):
    """(request, first token, end, whether that is all of the request) of a work item."""
    p_record = work_ptr + 4 * item
    whole = tl.load(p_record + 3) != 0
    return tl.load(p_record), tl.load(p_record + 1), tl.load(p_record + 2), whole


@triton.jit
def _load_length(seq_lens_ptr, index, mask, MAX_CONTEXT: tl.constexpr):
    """Lengths as int32; beyond the buffers' size they are cut, so that nothing is overrun."""
    length = tl.load(seq_lens_ptr + index, mask=mask, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(length, 0), MAX_CONTEXT)


@triton.jit
def _count(
    seq_lens_ptr, batch, request, tokens, shift, RULE: tl.constexpr, MAX_CONTEXT: tl.constexpr
):
    """Pieces of so many tokens in front of a request, and of all; None: its splits, shifted."""
    BLOCK: tl.constexpr = 1024
    before = tl.zeros([BLOCK], dtype=tl.int32)
    every = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, batch, BLOCK):
        i_other = begin + tl.arange(0, BLOCK)
        length = _load_length(seq_lens_ptr, i_other, i_other < batch, MAX_CONTEXT)
        size = tokens
        if tokens is None:
            size = split_tokens(length, RULE) << shift
        pieces = tl.cdiv(length, size)
        before += tl.where(i_other < request, pieces, 0)
        every += pieces
    return tl.sum(before, 0), tl.sum(every, 0)


@triton.jit
def _cost(items, tokens, RULE: tl.constexpr):
    """What so many work items of so many tokens cost, in tokens that a busy GPU reads meanwhile.

    Programs take rounds of one item each. An item costs something to begin and end. In a last round
    that does not fill the GPU each program is quicker, by a third at most. Measured on an H200.
    """
    ITEM_COST: tl.constexpr = 96
    rounds = items * RULE.heads // RULE.programs
    rest = items * RULE.heads % RULE.programs
    last = tokens * tl.maximum(rest, RULE.programs * 2 // 3) // RULE.programs + ITEM_COST
    return rounds * (tokens + ITEM_COST) + tl.where(rest > 0, last, 0)


@triton.jit
def _chunks_are_quicker(splits, chunks, RULE: tl.constexpr):
    """Whether a batch takes less time, about, with chunks as work items. Changes no bit."""
    coarse = _cost(splits, chunks * RULE.step // tl.maximum(splits, 1), RULE)
    # What chunks leave to the merge is a sixteenth more bytes.
    fine = _cost(chunks, RULE.step + RULE.step // 16, RULE)
    return (chunks <= RULE.most_chunks) & (fine < coarse)


@triton.jit(do_not_specialize=["batch", "slot_stride"])
def _plan_kernel(
    slot_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    qo_indptr_ptr,
    slot_map_ptr,
    mapped_table_ptr,
    page_table_ptr,
    seq_lens_out_ptr,
    qo_indptr_out_ptr,
    work_indptr_ptr,
    sizes_ptr,
    work_ptr,
    batch,
    slot_stride,
    PAGE: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    RULE: tl.constexpr,
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
        slot = tl.maximum(slot, 0)
        tl.store(pages_ptr + i_page, slot // PAGE, mask=m_page)
        if slot_map_ptr is not None:
            mapped = tl.maximum(tl.load(slot_map_ptr + slot, mask=m_page, other=0), 0)
            p_mapped = mapped_table_ptr + request.to(tl.int64) * MAX_PAGES + i_page
            tl.store(p_mapped, (mapped // PAGE).to(tl.int32), mask=m_page)

    last = request == batch - 1
    if RULE is not None:
        shift = 0
        first, items = _count(seq_lens_ptr, batch, request, None, shift, RULE, MAX_CONTEXT)
        splits = items
        while items > RULE.most_items:
            shift += 1
            first, items = _count(seq_lens_ptr, batch, request, None, shift, RULE, MAX_CONTEXT)
        tokens = split_tokens(length, RULE) << shift
        parts = 1
        if RULE.most_chunks > 0:
            before, chunks = _count(
                seq_lens_ptr, batch, request, RULE.step, shift, RULE, MAX_CONTEXT
            )
            if _chunks_are_quicker(splits, chunks, RULE):
                first = before
                items = chunks
                tokens = tl.zeros([], tl.int32) + RULE.step
                parts = RULE.min_tokens // RULE.step
        own_items = tl.cdiv(length, tokens)
        tl.store(work_indptr_ptr + request, first)
        tl.store(work_indptr_ptr + batch, items, mask=last)
        tl.store(sizes_ptr, items, mask=last)
        tl.store(sizes_ptr + 1, parts, mask=last)
        for begin in range(0, own_items, BLOCK):
            i_item = begin + lane
            m_item = i_item < own_items
            start = i_item * tokens
            p_work = work_ptr + (first + i_item) * 4
            none = tl.zeros([BLOCK], tl.int32)
            tl.store(p_work, none + request, mask=m_item)
            tl.store(p_work + 1, start, mask=m_item)
            tl.store(p_work + 2, tl.minimum(start + tokens, length), mask=m_item)
            tl.store(p_work + 3, none + (own_items == 1).to(tl.int32), mask=m_item)
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
        "RULE": rule,
        "BLOCK": 1024,
    }


def _launch(
    slot_table, rows, seq_lens, qo, mapped, outputs, *, batch, page_size, max_context, rule
):
    page_table, *others = outputs
    slot_map, mapped_table = mapped or (None, None)
    _plan_kernel[(batch,)](
        slot_table,
        rows,
        seq_lens,
        qo,
        slot_map,
        mapped_table,
        page_table,
        *others,
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
    work: WorkList,
    mapped: Mapped | None = None,
) -> None:
    """Fills the decode buffers for the first ``batch`` rows (module docstring); one launch."""
    if batch == 0:
        work.indptr[:1].zero_()
        work.sizes.zero_()
        return
    outputs = (page_table, seq_lens_out, seq_lens_out, *work)
    _launch(
        slot_table,
        rows,
        seq_lens,
        rows,
        mapped,
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
    mapped: Mapped | None = None,
) -> None:
    """Fills the extend buffers and copies ``qo_indptr [B + 1]`` into its own; one launch."""
    if batch == 0:
        return
    outputs = (page_table, seq_lens_out, qo_indptr_out, *[qo_indptr_out] * 3)
    _launch(
        slot_table,
        rows,
        seq_lens,
        qo_indptr,
        mapped,
        outputs,
        batch=batch,
        page_size=page_size,
        max_context=max_context,
        rule=None,
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to."""
    rule = SplitRule(1024, 1024, 1, 128, 4096, 512, 8, 1056)
    for decode, page, index, mapped in (
        (True, 128, "i64", None),
        (False, 64, "i64", None),
        (True, 32, "i32", None),
        (True, 128, "i64", "i64"),
        (False, 128, "i64", "i64"),
    ):
        names = ("slot_table", "qo_indptr", "page_table", "seq_lens_out", "qo_indptr_out")
        work = ("work_indptr", "sizes", "work")
        signature = {f"{name}_ptr": "*i32" for name in (*names, *work)}
        signature |= {"rows_ptr": f"*{index}", "seq_lens_ptr": f"*{index}"}
        signature |= {"batch": "i32", "slot_stride": "i32"}
        constants = _constants(page, 131072, 131072 // page, rule if decode else None)
        signature["slot_map_ptr"] = f"*{mapped}" if mapped else "constexpr"
        signature["mapped_table_ptr"] = "*i32" if mapped else "constexpr"
        if mapped is None:
            constants |= {"slot_map_ptr": None, "mapped_table_ptr": None}
        kind = "decode" if decode else "extend"
        yield CompileCase(
            name=f"plan-{kind}-p{page}-{index}{'-mapped' if mapped else ''}",
            kernel=_plan_kernel,
            signature=signature,
            constexprs=constants,
        )
