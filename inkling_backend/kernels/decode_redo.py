"""Decode again, exactly: the splits that `decode_fast` could not hold in float16.

`decode_fast` leaves NaN in the ``total`` of such a work item and counts it in ``failures``. A split
is computed again as a whole, by the arithmetic of `decode.py`, so that its bits do not depend on
whether its work items were chunks: its first item takes the result, the others become empty.
Nothing to do is the rule, and costs a launch that ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_backend.kernels.arguments import Example
from inkling_backend.kernels.codec import load_query
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import (
    CHUNK_TOKENS,
    KernelConfig,
    decode_config,
    persistent_programs,
)
from inkling_backend.kernels.decode import (
    DecodeCall,
    attend_split,
    decode_case,
    store_split,
)
from inkling_backend.kernels.launch import early, wait_for_previous
from inkling_backend.kernels.plan import load_record
from inkling_backend.kernels.query_rows import query_offset, query_rows, tree_words


@triton.jit(do_not_specialize=["window"])
def _decode_redo_kernel(
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
    if tl.load(failures_ptr) == 0:
        return
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    ROWS: tl.constexpr = Q_LEN * K.heads * GROUP
    m_m, token, i_g, offset = query_rows(0, BLOCK_M, GROUP, Q_LEN, K.heads)
    i_d = tl.arange(0, V.pad)

    # Tokens of a split, if its chunks are work items.
    split = tl.load(sizes_ptr + 1) * CHUNK
    items = tl.load(sizes_ptr) * K.heads
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        work = item // K.heads
        head = item % K.heads
        request, start, end, whole = load_record(work_ptr, work)
        length = tl.load(seq_lens_ptr + request)
        # The first item of a split looks after all of them.
        parts = 1
        leads = True
        if split > CHUNK:
            leads = start % split == 0
            parts = tl.cdiv(tl.minimum(length - start, split), CHUNK)
            end = tl.minimum(start + split, length)
        if leads:
            row = request.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
            part = work.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
            failed = tl.zeros([BLOCK_M], tl.int32)
            for i in range(0, parts):
                total = tl.load(total_ptr + part + i * ROWS, mask=m_m, other=0.0)
                failed = tl.where(total != total, 1, failed)
            if tl.max(failed, 0) != 0:
                place = query_offset(
                    request, head, q_stride, token, i_g, offset, GROUP, Q_LEN, K.dim
                )
                q = load_query(q_ptr, q_scale_ptr, place, m_m, QUANTIZED, K.dim, K.pad)
                newest = length - Q_LEN
                oldest = None
                if window is not None:
                    oldest = newest - window
                tree = None
                if tree_ptr is not None:
                    tree = tree_words(tree_ptr, request, token, m_m, Q_LEN)
                acc, top, total = attend_split(
                    q,
                    k_ptr,
                    k_scale_ptr,
                    k_first_ptr,
                    v_ptr,
                    v_scale_ptr,
                    v_first_ptr,
                    page_table_ptr + request.to(tl.int64) * MAX_PAGES,
                    head,
                    start,
                    end,
                    newest,
                    oldest,
                    token,
                    tree,
                    scale_log2,
                    softcap_log2,
                    Q_LEN=Q_LEN,
                    BLOCK_N=BLOCK_N,
                    K=K,
                    V=V,
                )
                store_split(
                    partial_ptr,
                    top_ptr,
                    total_ptr,
                    out_ptr,
                    row,
                    part,
                    m_m,
                    acc,
                    top,
                    total,
                    v_global,
                    sinks_ptr,
                    head * GROUP + i_g,
                    whole,
                    V,
                )
                m_d = m_m[:, None] & (i_d < V.dim)[None, :]
                for i in range(1, parts):
                    other = part + i * ROWS
                    nothing = tl.zeros([BLOCK_M], tl.float32)
                    tl.store(top_ptr + other, nothing - float("inf"), mask=m_m)
                    tl.store(total_ptr + other, nothing, mask=m_m)
                    p_partial = partial_ptr + other[:, None] * V.dim + i_d[None, :]
                    tl.store(p_partial, tl.zeros_like(acc), mask=m_d)


def _constants(config: KernelConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CHUNK": CHUNK_TOKENS,
    }


def decode_redo(call: DecodeCall) -> None:
    """Computes the splits again whose work items `decode_fast` marked; one launch."""
    config = decode_config(call.rows, call.cache.layout)
    _decode_redo_kernel[(persistent_programs(config, call.out.device),)](
        *call.arguments(),
        **call.constants(),
        **_constants(config),
        **early(call.out.device, call.batch),
        **config.options,
    )


def redo_case(example: Example) -> CompileCase:
    """What a launch compiles to after one of `decode_fast` for the same example."""
    config = decode_config(example.rows, example.layout)
    constants = _constants(config) | {"EARLY": False}
    return decode_case(_decode_redo_kernel, example, config, constants)
