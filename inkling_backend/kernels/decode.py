"""Decode: one new token per request, or a few, against the paged, block-scaled cache.

A persistent grid of fixed size walks the work list of `plan.py`. One program takes one work item
(request, split) and one KV head, with all query heads of its group as rows, of all new tokens, and
reads K and V as they are stored. A request of one split is finished here; the others leave a
partial result for `merge.py`. Nothing a program computes depends on which other requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arguments import (
    Example,
    bias_arguments,
    biased_examples,
    cache_arguments,
    cache_constants,
    compile_case,
    examples,
    layer_arguments,
)
from inkling_backend.kernels.codec import load_query, load_tokens, to_float32
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import (
    KernelConfig,
    decode_config,
    persistent_programs,
)
from inkling_backend.kernels.plan import WorkList, load_record
from inkling_backend.kernels.query_rows import query_offset, query_rows, tree_words
from inkling_backend.kernels.tile import (
    add_bias,
    bias_rows,
    finite,
    finite_or_nan,
    mark_seen,
    normalizer,
    raw_logits,
    sees_new,
    soft_cap,
    softmax_step,
    tile_slots,
    to_dtype,
)


class Partial(NamedTuple):
    """Partial results of work items.

    Shapes are those for one query token; for several, the tokens come before the heads.

    out: ``[items, Hq, Dv]`` float32, sum of the rows of V times their exponentials, without the
        global scale of V.
    top: ``[items, Hq]`` float32, the largest logit, to base 2; -inf if the item has none.
    total: ``[items, Hq]`` float32, sum of the exponentials of two, relative to ``top``.
    failures: ``[1]`` int32, items that `decode_fast` left to `decode_redo`; 0 between steps.
    """

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    failures: torch.Tensor

    @classmethod
    def empty(cls, items: int, q_heads: int, v_head_dim: int, device: torch.device) -> Partial:
        """Buffers for so many work items."""
        rows = (items, q_heads)
        return cls(
            torch.empty((*rows, v_head_dim), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


class DecodeCall(NamedTuple):
    """Decode of one layer: what its kernels take.

    query: ``[B * q_len, Hq, Dk]``.
    page_table, seq_lens, work: as `plan.plan_decode` left them.
    batch: requests.
    partial: room for every work item.
    out: ``[B * q_len, Hq, Dv]`` bfloat16 or float16.
    layer: what the layer asks for; several tokens are causal.
    q_len: query tokens of each request, the last ones of it.
    tree: ``[B, q_len]`` int64, as in `AttentionRunner.plan_decode`; None: tokens are causal.
    split_chunks: chunks of a split, where its chunks may be work items.
    """

    query: Query
    cache: LayerCache
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    work: WorkList
    batch: int
    partial: Partial
    out: torch.Tensor
    layer: LayerAttention
    q_len: int = 1
    tree: torch.Tensor | None = None
    split_chunks: int = 1

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.query.data.shape[1] // self.cache.layout.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows that meet one KV head: of the group, of every query token."""
        return self.group * self.q_len

    def arguments(self) -> tuple[Any, ...]:
        """The run-time arguments of a decode kernel, in their order."""
        return (
            *cache_arguments(self.query, self.cache),
            self.page_table,
            self.seq_lens,
            self.tree,
            self.work.sizes,
            self.work.records,
            *self.partial,
            self.out,
            *layer_arguments(self.layer),
        )

    def constants(self) -> dict[str, Any]:
        """The constants of a decode kernel that do not depend on its tiles."""
        return {
            **cache_constants(self.cache.layout, self.group, self.page_table.shape[1]),
            "QUANTIZED": self.query.scale is not None,
            "Q_LEN": self.q_len,
        }


def decode_case(
    kernel: Any, example: Example, config: KernelConfig, constants: dict[str, Any], **words: str
) -> CompileCase:
    """The compile case of a decode kernel; ``words`` are types of arguments of its own."""
    integers = ("page_table", "seq_lens", "sizes", "work", "failures")
    signature = {
        **dict.fromkeys((f"{name}_ptr" for name in integers), "*i32"),
        **dict.fromkeys(("partial_ptr", "top_ptr", "total_ptr"), "*fp32"),
        "tree_ptr": "*i64" if example.tree else "constexpr",
        "out_ptr": f"*{example.dtype}",
        **words,
    }
    shape = cache_constants(example.layout, example.group, 1024)
    constants = {**shape, "Q_LEN": example.q_len, **constants}
    return compile_case(kernel, example, signature, constants, config)


@triton.jit
def _seen(pos, live, token, tree, newest, oldest, Q_LEN: tl.constexpr):
    """Whether rows see a tile's tokens, ``[M, N]``, or ``[1, N]`` where all rows see the same."""
    seen = live[None, :]
    if Q_LEN > 1:
        if tree is None:
            seen = seen & (pos[None, :] - token[:, None] <= newest)
        else:
            seen = seen & sees_new(tree[:, None], (pos - newest)[None, :])
        if oldest is not None:
            seen = seen & (pos[None, :] - token[:, None] >= oldest)
    return seen


@triton.jit
def attend_split(
    q,
    k_ptr,
    k_scale_ptr,
    k_first_ptr,
    v_ptr,
    v_scale_ptr,
    v_first_ptr,
    table_ptr,
    head,
    start,
    end,
    newest,
    oldest,
    token,
    tree,
    scale_log2,
    softcap_log2,
    Q_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    biases=None,
    bias_extent=None,
):
    """Attention of one group's rows over the tokens ``start`` to ``end`` of one request.

    Args:
        q: ``[M, K.pad]``, the group's query heads.
        table_ptr: the request's page table.
        newest: last position that the first query token sees: its own.
        oldest: first position that it sees (it may be negative); None if there is no window.
        token: ``[M]``, query token of each row.
        tree: ``[M]``, of `query_rows.tree_words`; None where new tokens are causal.
        scale_log2, softcap_log2: as in `layer_arguments`, with the global scale of K.
        biases: ``[M]``, of `tile.bias_rows`; None where logits have no bias.

    Returns:
        (acc ``[M, V.pad]``, top ``[M]``, total ``[M]``) as in `Partial`.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    V_PAD: tl.constexpr = V.pad
    acc = tl.zeros([BLOCK_M, V_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    dirty = tl.zeros([BLOCK_N], dtype=tl.int32)
    step_log2 = scale_log2
    if softcap_log2 is not None or biases is not None:
        step_log2 = 1.0
    if oldest is not None:
        start = tl.maximum(start, oldest // BLOCK_N * BLOCK_N)
    for tile in range(start, end, BLOCK_N):
        pos, slot, live = tile_slots(table_ptr, tile, end, K.page, BLOCK_N)
        if oldest is not None:
            live = live & (pos >= oldest)
        k = load_tokens(k_ptr, k_scale_ptr, k_first_ptr, tile, pos, slot, head, live, K)  # [N, DK]
        logits = raw_logits(q, k)
        if softcap_log2 is not None:
            logits = soft_cap(logits, scale_log2 / softcap_log2, softcap_log2)
        if biases is not None:
            factor = 1.0 if softcap_log2 is not None else scale_log2
            distance = (newest + token)[:, None] - pos[None, :]
            logits = add_bias(logits, factor, biases, distance, bias_extent)
        seen = _seen(pos, live, token, tree, newest, oldest, Q_LEN)
        logits = tl.where(seen, logits, float("-inf"))
        v = load_tokens(v_ptr, v_scale_ptr, v_first_ptr, tile, pos, slot, head, live, V)  # [N, DV]
        if Q_LEN > 1:
            # As in extend: a NaN must not reach the query tokens before it.
            bad = ~finite(to_float32(v))
            dirty = tl.maximum(dirty, tl.max(bad.to(tl.int32), 1))
            v = tl.where(bad, 0.0, v)
        acc, row_max, row_sum = softmax_step(logits, v, acc, row_max, row_sum, step_log2)
    if Q_LEN > 1:  # noqa: SIM102 - this is decided when compiling
        if tl.max(dirty, 0) > 0:
            for tile in range(start, end, BLOCK_N):
                pos, slot, live = tile_slots(table_ptr, tile, end, K.page, BLOCK_N)
                if oldest is not None:
                    live = live & (pos >= oldest)
                v = load_tokens(v_ptr, v_scale_ptr, v_first_ptr, tile, pos, slot, head, live, V)
                acc = mark_seen(acc, _seen(pos, live, token, tree, newest, oldest, Q_LEN), v)
    # A sum that is a product alone, as in `tile.soft_cap`.
    return acc, tl.fma(row_max, step_log2, 0.0), row_sum


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
    sinks_ptr,
    q_head,
    finished,
    V: tl.constexpr,
):
    """Result of a work item: the output if ``finished``, else the partial result.

    Args:
        row, part: ``[M]`` int64, rows of the output and of the partial results.
        acc, top, total: of `attend_split`.
        q_head: ``[M]``, of the query heads, for their sinks.
    """
    i_d = tl.arange(0, V.pad)
    m_out = m_row[:, None] & (i_d < V.dim)[None, :]
    if finished:
        factor = normalizer(v_global, top, total, sinks_ptr, q_head)
        result = finite_or_nan(acc) * factor[:, None]
        result = to_dtype(result, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * V.dim + i_d[None, :], result, mask=m_out)
    else:
        tl.store(partial_ptr + part[:, None] * V.dim + i_d[None, :], acc, mask=m_out)
        tl.store(top_ptr + part, top, mask=m_row)
        tl.store(total_ptr + part, total, mask=m_row)


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
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
    bias_ptr,
    bias_row_stride,
    bias_head_stride,
    bias_extent,
    MAX_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    tl.static_assert(GROUP * Q_LEN <= BLOCK_M)
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)
    ROWS: tl.constexpr = Q_LEN * K.heads * GROUP
    m_m, token, i_g, offset = query_rows(0, BLOCK_M, GROUP, Q_LEN, K.heads)

    items = tl.load(sizes_ptr) * K.heads
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # Neighbouring programs take neighbouring heads of the same tokens.
        work = item // K.heads
        head = item % K.heads
        request, start, end, whole = load_record(work_ptr, work)
        row = request.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
        place = query_offset(request, head, q_stride, token, i_g, offset, GROUP, Q_LEN, K.dim)
        q = load_query(q_ptr, q_scale_ptr, place, m_m, QUANTIZED, K.dim, K.pad)
        newest = tl.load(seq_lens_ptr + request) - Q_LEN
        oldest = None
        if window is not None:
            oldest = newest - window
        tree = None
        if tree_ptr is not None:
            tree = tree_words(tree_ptr, request, token, m_m, Q_LEN)
        biases = None
        if bias_ptr is not None:
            biases = bias_rows(
                *(bias_ptr, bias_row_stride, bias_head_stride),
                *(request.to(tl.int64) * Q_LEN + token, head * GROUP + i_g, m_m),
            )
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
            biases=biases,
            bias_extent=bias_extent,
        )
        part = work.to(tl.int64) * ROWS + head * GROUP + offset  # [M]
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


def decode(call: DecodeCall) -> None:
    """Attention of requests with one query token or a few; one launch, graph-capturable.

    Writes ``call.out`` of requests of one work item, and the partial results of the others, which
    `merge.merge` finishes.
    """
    config = decode_config(call.rows, call.cache.layout)
    _decode_kernel[(persistent_programs(config, call.out.device),)](
        *call.arguments(),
        *bias_arguments(call.layer),
        **call.constants(),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **config.options,
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to, over `arguments.examples`."""
    for example in (*examples(), *biased_examples()):
        config = decode_config(example.rows, example.layout)
        constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        bias = example.bias_signature()
        yield decode_case(_decode_kernel, example, config, constants, **bias)
