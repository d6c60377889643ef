"""Merge: the parts of a request that decode cut, added in position order.

One program per request and query head. Requests of one split were finished by decode and are left
alone; requests of length 0 get zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import MOST_SPLITS
from inkling_backend.kernels.decode import Partial
from inkling_backend.kernels.tile import to_dtype


@triton.jit
def _merge_kernel(
    partial_ptr,
    top_ptr,
    total_ptr,
    split_indptr_ptr,
    out_ptr,
    Q_HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) // Q_HEADS
    head = tl.program_id(0) % Q_HEADS
    first = tl.load(split_indptr_ptr + request)
    splits = tl.load(split_indptr_ptr + request + 1) - first
    if splits == 1:
        return
    i_all = tl.arange(0, MAX_SPLITS)
    p_top = top_ptr + (first + i_all).to(tl.int64) * Q_HEADS + head
    highest = tl.max(tl.load(p_top, mask=i_all < splits, other=float("-inf")), 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)

    i_d = tl.arange(0, DV_PAD)
    m_d = i_d < DV
    acc = tl.zeros([DV_PAD], dtype=tl.float32)
    norm = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, splits, BLOCK):
        i_s = begin + tl.arange(0, BLOCK)
        m_s = i_s < splits
        row = (first + i_s).to(tl.int64) * Q_HEADS + head  # [BLOCK]
        top = tl.load(top_ptr + row, mask=m_s, other=float("-inf"))
        total = tl.load(total_ptr + row, mask=m_s, other=0.0)
        weight = tl.math.exp2(top - highest)
        p_part = partial_ptr + row[:, None] * DV + i_d[None, :]
        part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)  # [BLOCK, DV]
        acc += tl.sum(weight[:, None] * part, 0)
        norm += weight * total
    norms = tl.sum(norm, 0)
    acc = acc / tl.where(norms == 0.0, 1.0, norms)
    p_out = out_ptr + tl.program_id(0).to(tl.int64) * DV + i_d
    tl.store(p_out, to_dtype(acc, out_ptr.dtype.element_ty), mask=m_d)


def _constants(q_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "Q_HEADS": q_heads,
        "DV": head_dim,
        "DV_PAD": max(16, triton.next_power_of_2(head_dim)),
        "MAX_SPLITS": MOST_SPLITS,
        "BLOCK": 16,
    }


def merge(partial: Partial, split_indptr: torch.Tensor, *, batch: int, out: torch.Tensor) -> None:
    """Finishes what `decode.decode` left in its partial results; one launch.

    Args:
        split_indptr: ``[batch + 1]`` int32.
        out: ``[batch, Hq, Dv]``.
    """
    _, q_heads, head_dim = partial.out.shape
    _merge_kernel[(batch * q_heads,)](
        *partial, split_indptr, out, **_constants(q_heads, head_dim), num_warps=2
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to."""
    for head_dim, dtype in (
        (64, "bf16"),
        (96, "bf16"),
        (128, "bf16"),
        (256, "bf16"),
        (128, "fp16"),
    ):
        signature = {
            "partial_ptr": "*fp32",
            "top_ptr": "*fp32",
            "total_ptr": "*fp32",
            "split_indptr_ptr": "*i32",
            "out_ptr": f"*{dtype}",
        }
        name = f"merge-{dtype}-d{head_dim}"
        constants = _constants(32, head_dim)
        yield CompileCase(name, _merge_kernel, signature, constants, num_warps=2)
