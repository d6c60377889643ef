"""Extend: several new tokens per request against the paged, block-scaled cache.

The new tokens are in the cache already (store runs first), so a prefix from the prefix cache, an
earlier chunk and the tokens themselves are read alike. One program takes `block_m` rows, tokens
times the query heads of one KV head, and walks the KV tiles that any of them sees. Tile borders
depend on positions alone, so a row's result is the same in whatever chunk or batch it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.arguments import (
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
from inkling_backend.kernels.configs import KernelConfig, extend_config
from inkling_backend.kernels.tile import (
    add_bias,
    bias_rows,
    finite,
    finite_or_nan,
    mark_seen,
    normalizer,
    raw_logits,
    soft_cap,
    softmax_step,
    tile_slots,
    to_dtype,
)


@triton.jit
def _sees(pos_k, first, last):
    """Whether rows that see the positions ``first`` (None: from 0) to ``last`` ``[M]`` see a tile's
    ``pos_k [N]``: bool ``[M, N]``."""
    seen = pos_k[None, :] <= last[:, None]
    if first is not None:
        seen = seen & (pos_k[None, :] >= first[:, None])
    return seen


@triton.jit(do_not_specialize=["batch", "tiles", "window"])
def _extend_kernel(
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
    qo_indptr_ptr,
    out_ptr,
    batch,
    tiles,
    sm_scale_log2,
    window,
    softcap_log2,
    sinks_ptr,
    bias_ptr,
    bias_row_stride,
    bias_head_stride,
    bias_extent,
    marks_ptr,
    MAX_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    V_PAD: tl.constexpr = V.pad
    # The last rows see most and so start first; heads are neighbours.
    head = tl.program_id(0) % K.heads
    request = tl.program_id(0) // K.heads % batch
    i_tile = tiles - 1 - tl.program_id(0) // K.heads // batch
    q_start = tl.load(qo_indptr_ptr + request)
    q_len = tl.load(qo_indptr_ptr + request + 1) - q_start
    first_row = i_tile * BLOCK_M
    empty = first_row >= q_len * GROUP
    if marks_ptr is not None:
        empty = empty | (tl.load(marks_ptr + request * K.heads + head) == 0)
    if empty:
        return
    scale_log2 = sm_scale_log2
    if k_global_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_global_ptr)
    v_global = 1.0
    if v_global_ptr is not None:
        v_global = tl.load(v_global_ptr)

    i_row = first_row + tl.arange(0, BLOCK_M)
    token = i_row // GROUP  # [M], of this request's new tokens
    m_row = token < q_len
    length = tl.load(seq_lens_ptr + request)
    first_pos = length - q_len
    pos_q = first_pos + token  # [M]
    lowest = first_pos + first_row // GROUP
    highest = first_pos + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    last = pos_q
    end = highest + 1
    # Up to here every row of the tile sees every token.
    whole = tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N
    if not CAUSAL:
        last = tl.where(pos_q < 0, -1, length - 1)
        end = length
        whole = tl.where(lowest < 0, 0, length // BLOCK_N * BLOCK_N)
    # With a window, tiles before `begin` are seen by no row, those from `inner` on by every row.
    first = None
    begin = 0
    inner = 0
    if window is not None:
        first = pos_q - window
        begin = tl.maximum(lowest - window, 0) // BLOCK_N * BLOCK_N
        inner = (tl.maximum(highest - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        whole = tl.maximum(whole, inner)
    table_ptr = page_table_ptr + request.to(tl.int64) * MAX_PAGES

    row = (q_start + token).to(tl.int64) * (K.heads * GROUP) + head * GROUP + i_row % GROUP  # [M]
    place = (q_start + token).to(tl.int64) * q_stride + (head * GROUP + i_row % GROUP) * K.dim
    q = load_query(q_ptr, q_scale_ptr, place, m_row, QUANTIZED, K.dim, K.pad)
    acc = tl.zeros([BLOCK_M, V_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    dirty = tl.zeros([BLOCK_N], dtype=tl.int32)
    step_log2 = scale_log2
    if softcap_log2 is not None or bias_ptr is not None:
        step_log2 = 1.0
    if bias_ptr is not None:
        biases = bias_rows(
            *(bias_ptr, bias_row_stride, bias_head_stride),
            *(q_start + token, head * GROUP + i_row % GROUP, m_row),
        )
    for stage in tl.static_range(0 if window is not None else 1, 3):
        if stage == 0:
            tiles_from, tiles_to = begin, tl.minimum(inner, end)
        elif stage == 1:
            tiles_from, tiles_to = inner, whole
        else:
            tiles_from, tiles_to = whole, end
        for tile in range(tiles_from, tiles_to, BLOCK_N):
            pos_k, slot, live = tile_slots(table_ptr, tile, end, K.page, BLOCK_N)
            k = load_tokens(k_ptr, k_scale_ptr, k_first_ptr, tile, pos_k, slot, head, live, K)
            logits = raw_logits(q, k)
            if softcap_log2 is not None:
                logits = soft_cap(logits, scale_log2 / softcap_log2, softcap_log2)
            if bias_ptr is not None:
                factor = 1.0 if softcap_log2 is not None else scale_log2
                distance = pos_q[:, None] - pos_k[None, :]
                logits = add_bias(logits, factor, biases, distance, bias_extent)
            v = load_tokens(v_ptr, v_scale_ptr, v_first_ptr, tile, pos_k, slot, head, live, V)
            if stage != 1:
                logits = tl.where(_sees(pos_k, first, last), logits, float("-inf"))
                # Zero times NaN is NaN: a NaN of a later token would reach the rows before it that
                # share its chunk.
                bad = ~finite(to_float32(v))
                dirty = tl.maximum(dirty, tl.max(bad.to(tl.int32), 1))
                v = tl.where(bad, 0.0, v)
            acc, row_max, row_sum = softmax_step(logits, v, acc, row_max, row_sum, step_log2)

    if tl.max(dirty, 0) > 0:
        # Rare: now what was taken out goes, as NaN, to the rows that see it.
        for tile in range(begin if window is not None else whole, end, BLOCK_N):
            pos_k, slot, live = tile_slots(table_ptr, tile, end, K.page, BLOCK_N)
            v = load_tokens(v_ptr, v_scale_ptr, v_first_ptr, tile, pos_k, slot, head, live, V)
            acc = mark_seen(acc, _sees(pos_k, first, last), v)
    # And an Inf that a row saw in a whole tile ends like that, too.
    acc = finite_or_nan(acc)
    # A sum that is a product alone, as in `tile.soft_cap`.
    top = tl.fma(row_max, step_log2, 0.0)
    norm = normalizer(v_global, top, row_sum, sinks_ptr, head * GROUP + i_row % GROUP)
    i_d = tl.arange(0, V.pad)
    p_out = out_ptr + row[:, None] * V.dim + i_d[None, :]
    m_out = m_row[:, None] & (i_d < V.dim)[None, :]
    # A row before position 0 sees nothing.
    out = tl.where((last < 0)[:, None], 0.0, acc * norm[:, None])
    tl.store(p_out, to_dtype(out, out_ptr.dtype.element_ty), mask=m_out)


@lru_cache(maxsize=64)
def _constants(
    layout: CacheLayout, group: int, max_pages: int, config: KernelConfig, causal: bool
) -> dict[str, Any]:
    return {
        **cache_constants(layout, group, max_pages),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
    }


def extend(
    query: Query,
    cache: LayerCache,
    *,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    batch: int,
    max_q_len: int,
    out: torch.Tensor,
    layer: LayerAttention,
    marks: torch.Tensor | None = None,
) -> None:
    """Attention of the new tokens of ``batch`` requests; one launch.

    Args:
        query: ``[T, Hq, Dk]``; row j of a request has position ``seq_len - q_len + j``.
        page_table, seq_lens, qo_indptr: as `plan.plan_extend` left them.
        max_q_len: no request has more new tokens.
        out: ``[T, Hq, Dv]`` bfloat16 or float16; rows beyond ``qo_indptr[batch]`` are not written.
        layer: what the layer asks for.
        marks: ``[batch, kv heads]`` int32: only where it is not 0 something is computed; None for
            everywhere.
    """
    layout = cache.layout
    group = query.data.shape[1] // layout.num_kv_heads
    config = extend_config(layout, biased=layer.bias is not None)
    tiles = -(-max_q_len * group // config.block_m)
    _extend_kernel[(tiles * batch * layout.num_kv_heads,)](
        *cache_arguments(query, cache),
        page_table,
        seq_lens,
        qo_indptr,
        out,
        batch,
        tiles,
        *layer_arguments(layer),
        *bias_arguments(layer),
        marks,
        QUANTIZED=query.scale is not None,
        **config.options,
        **_constants(layout, group, page_table.shape[1], config, layer.causal),
    )


def compile_cases() -> Iterator[CompileCase]:
    """What launches of this module compile to, over `arguments.examples`."""
    every = (*examples(), *biased_examples())
    for example in (each for each in every if each.q_len == 1):
        config = extend_config(example.layout, biased=example.biased)
        signature = {
            **dict.fromkeys(("page_table_ptr", "seq_lens_ptr", "qo_indptr_ptr"), "*i32"),
            "out_ptr": f"*{example.dtype}",
            **dict.fromkeys(("batch", "tiles"), "i32"),
            **example.bias_signature(),
            "marks_ptr": "constexpr",
        }
        causal = example.name != "features-encoder"
        constants = _constants(example.layout, example.group, 1024, config, causal)
        yield compile_case(_extend_kernel, example, signature, constants, config)
        if example.name == "nvfp4-nvfp4-d128":
            marked = example._replace(name=f"{example.name}-marks")
            signature["marks_ptr"] = "*i32"
            yield compile_case(_extend_kernel, marked, signature, constants, config)
