"""Merge: the parts of a request that decode cut, added in position order.

One program takes some columns of some query heads of one request; several query tokens of a request
are so many times the heads. Requests of one part were finished by decode and are left alone;
requests of length 0 get zeros. Parts that are chunks are first folded to splits, as `decode_fast`
does it. Splits are then added one after the other, relative to the largest logit of all. So the
result has the same bits however the work was cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from inkling_backend.kernels.codec import INTERPRETED
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import merge_tile
from inkling_backend.kernels.decode import DecodeCall
from inkling_backend.kernels.launch import early, wait_for_previous
from inkling_backend.kernels.tile import finite_or_nan, fold, normalizer, to_dtype

# Parts whose loads are issued together, by columns: enough to hide their latency. The interpreter
# hides none, and takes its time for parts that do not exist.
_FEW_COLUMNS, _AT_ONCE, _AT_ONCE_WIDE = 32, 32, 16
if INTERPRETED.value:
    _AT_ONCE = _AT_ONCE_WIDE = 1


@triton.jit
def _load_part(partial_ptr, top_ptr, total_ptr, row, live, i_d, m_d, DV: tl.constexpr):
    """(top, total, acc ``[D]``) of one part; an empty one where it is not ``live``."""
    acc = tl.load(partial_ptr + row * DV + i_d, mask=m_d & live, other=0.0)
    top = tl.load(top_ptr + row, mask=live, other=float("-inf"))
    return top, tl.load(total_ptr + row, mask=live, other=0.0), acc


@triton.jit
def _merge_kernel(
    partial_ptr,
    top_ptr,
    total_ptr,
    failures_ptr,
    work_indptr_ptr,
    sizes_ptr,
    v_global_ptr,
    sinks_ptr,
    out_ptr,
    Q_HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT_CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    BLOCKS: tl.constexpr = Q_HEADS // HEADS
    request = tl.program_id(0) // BLOCKS
    first = tl.load(work_indptr_ptr + request)
    parts = tl.load(work_indptr_ptr + request + 1) - first
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(failures_ptr, 0)
    if parts == 1:
        return
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    i_d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_d = i_d < DV
    for i_h in range(0, HEADS):
        head = tl.program_id(0) % BLOCKS * HEADS + i_h
        row = first.to(tl.int64) * Q_HEADS + head
        highest = tl.full([128], float("-inf"), tl.float32)
        for begin in range(0, parts, 128):
            i_p = begin + tl.arange(0, 128)
            tops = tl.load(top_ptr + row + i_p * Q_HEADS, mask=i_p < parts, other=float("-inf"))
            highest = tl.maximum(highest, tops)
        base = tl.max(highest, 0)
        base = tl.where(base == float("-inf"), 0.0, base)
        acc = tl.zeros([COLUMNS], dtype=tl.float32)
        total = 0.0
        if tl.load(sizes_ptr + 1) == 1:
            for begin in range(0, parts, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    part = begin + i
                    s_top, s_total, s_acc = _load_part(
                        *(partial_ptr, top_ptr, total_ptr, row + part * Q_HEADS, part < parts),
                        *(i_d, m_d, DV),
                    )
                    weight = tl.math.exp2(s_top - base)
                    total = tl.fma(s_total, weight, total)
                    acc = tl.fma(s_acc, tl.broadcast_to(weight, [COLUMNS]), acc)
        else:
            for begin in range(0, parts, AT_ONCE):
                for i in tl.static_range(0, AT_ONCE, SPLIT_CHUNKS):
                    s_top = float("-inf")
                    s_total = 0.0
                    s_acc = tl.zeros([COLUMNS], tl.float32)
                    for j in tl.static_range(SPLIT_CHUNKS):
                        part = begin + i + j
                        c_top, c_total, c_acc = _load_part(
                            *(partial_ptr, top_ptr, total_ptr, row + part * Q_HEADS, part < parts),
                            *(i_d, m_d, DV),
                        )
                        s_top, s_total, w, w_chunk = fold(s_top, s_total, c_top, c_total)
                        s_acc = tl.fma(s_acc, tl.broadcast_to(w, [COLUMNS]), c_acc * w_chunk)
                    weight = tl.math.exp2(s_top - base)
                    total = tl.fma(s_total, weight, total)
                    acc = tl.fma(s_acc, tl.broadcast_to(weight, [COLUMNS]), acc)
        p_out = out_ptr + (request.to(tl.int64) * Q_HEADS + head) * DV + i_d
        norm = normalizer(v_global, base, total, sinks_ptr, head % (Q_HEADS // Q_LEN))
        out = tl.where(parts == 0, 0.0, finite_or_nan(acc) * norm)
        tl.store(p_out, to_dtype(out, out_ptr.dtype.element_ty), mask=m_d)


def _constants(
    q_heads: int, q_len: int, head_dim: int, heads: int, columns: int, split_chunks: int
) -> dict[str, int]:
    at_once = _AT_ONCE if columns <= _FEW_COLUMNS else _AT_ONCE_WIDE
    return {
        "Q_HEADS": q_heads * q_len,
        "Q_LEN": q_len,
        "HEADS": heads,
        "DV": head_dim,
        "COLUMNS": columns,
        "SPLIT_CHUNKS": split_chunks,
        "AT_ONCE": max(1, at_once // split_chunks) * split_chunks,
    }


def merge(call: DecodeCall) -> None:
    """Finishes what decode left in ``call.partial``; one launch."""
    _, q_heads, head_dim = call.out.shape
    heads, columns = merge_tile(call.batch, q_heads * call.q_len, head_dim)
    grid = (call.batch * q_heads * call.q_len // heads, triton.cdiv(head_dim, columns))
    _merge_kernel[grid](
        *call.partial,
        call.work.indptr,
        call.work.sizes,
        call.cache.v_global,
        call.layer.sinks,
        call.out,
        **_constants(q_heads, call.q_len, head_dim, heads, columns, call.split_chunks),
        **early(call.out.device, call.batch),
        num_warps=1,
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to."""
    sizes = ((64, "bf16"), (96, "bf16"), (128, "bf16"), (256, "bf16"), (128, "fp16"))
    cases = [(*size, batch, False) for size, batch in itertools.product(sizes, (1, 1024))]
    for head_dim, dtype, batch, sinks in (*cases, (64, "bf16", 1024, True)):
        floats = ("partial_ptr", "top_ptr", "total_ptr", "v_global_ptr")
        signature = {
            **dict.fromkeys(floats, "*fp32"),
            "sinks_ptr": "*bf16" if sinks else "constexpr",
            **dict.fromkeys(("failures_ptr", "work_indptr_ptr", "sizes_ptr"), "*i32"),
            "out_ptr": f"*{dtype}",
        }
        name = f"merge-{dtype}-d{head_dim}-b{batch}{'-sinks' if sinks else ''}"
        tile = merge_tile(batch, 32, head_dim)
        constants: dict[str, Any] = _constants(32, 1, head_dim, *tile, 32 if sinks else 8)
        constants |= {"EARLY": False}
        if not sinks:
            constants |= {"sinks_ptr": None}
        yield CompileCase(name, _merge_kernel, signature, constants, num_warps=1)
