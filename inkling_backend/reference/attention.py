"""Attention over a paged cache in float32, in plain torch: the oracle, and the CPU path."""

from __future__ import annotations

import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.formats.query import Query
from inkling_backend.reference.gather import read_request
from inkling_backend.reference.pages import scale_index

# Rows computed together, cut at multiples of this position: every row meets the same matrix shapes
# however its prompt was chunked (chunks and cached prefixes end at pages), so it rounds the same.
_TILE = 32


def attend(
    query: Query,
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    layer: LayerAttention,
    out: torch.Tensor,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ragged queries over the cached tokens of their requests.

    Row j of request b's ``n`` rows stands at position ``seq_lens[b] - n + j`` and sees what
    ``layer`` says; a row before position 0 sees nothing and gives zeros. A token that a row does
    not see cannot reach it, whatever its bytes are. Synchronises with the host.

    Args:
        query: ``[T, query heads, Dk]``; query heads are a multiple of the kv heads.
        cache: the layer's buffers, new tokens already stored.
        page_table: ``[B, max_pages]`` integer page numbers in position order.
        seq_lens: ``[B]`` integer tokens per request, new ones included.
        qo_indptr: ``[B + 1]`` integer; request b has the query rows ``qo_indptr[b:b + 2]``.
        layer: scale, window, soft-cap, causality, sinks and bias.
        out: ``[T, query heads, Dv]``, any float dtype; every row of a request is written.
        tree: ``[T]`` int64, which of its request's new tokens a row sees: bit j the j-th. Instead
            of causality among them; at most 64. Not with a bias, whose distances are positions'.

    Returns:
        ``out``.
    """
    _check_shapes(query, cache, page_table, seq_lens, qo_indptr, out)
    layer.check_sinks(query.data.shape[1])
    layer.check_bias(*query.data.shape[:2])
    q = query.dequantize() * layer.sm_scale
    page = cache.layout.page_size
    bounds = qo_indptr.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        first, last = bounds[b], bounds[b + 1]
        if first == last:
            continue
        if length <= 0:
            out[first:last] = 0
            continue
        positions = torch.arange(length, device=page_table.device)
        slots = page_table[b, positions // page].long() * page + positions % page
        index = scale_index(cache.layout, slots)
        k, v = (read_request(slots, cache, side, index) for side in ("k", "v"))
        words = None if tree is None else tree[first:last]
        bias = None if layer.bias is None else layer.bias[first:last].float()
        out[first:last] = _attend_one(q[first:last], k, v, layer, words, bias)
    return out


def _attend_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerAttention,
    tree: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, Hq, Dk]`` scaled, ``[L, Hkv, Dk]``, ``[L, Hkv, Dv]`` -> ``[n, Hq, Dv]``, float32."""
    n, num_q_heads, dk = q.shape
    length, num_kv_heads, dv = v.shape
    group = num_q_heads // num_kv_heads
    q = q.view(n, num_kv_heads, group, dk).transpose(0, 1)  # [Hkv, n, group, Dk]
    k, v = k.permute(1, 2, 0), v.transpose(0, 1)  # [Hkv, Dk, L], [Hkv, L, Dv]
    window = length if layer.window is None else layer.window
    if bias is not None:
        bias = bias.unflatten(1, (num_kv_heads, group)).transpose(0, 1)  # [Hkv, n, group, extent]
    if n == 1:
        oldest = max(0, length - 1 - window)
        logits = (q.flatten(1, 2) @ k[..., oldest:]).unflatten(1, (1, group))
        added = _bias(bias, torch.arange(length - 1 - oldest, -1, -1, device=q.device)[None])
        out = _probabilities(logits, None, layer, added).flatten(1, 2) @ v[:, oldest:]
        return _finite_or_nan(out).reshape(1, num_q_heads, dv)
    bad = ~torch.isfinite(v)
    finite = not bool(bad.any())
    clean = v if finite else v.masked_fill(bad, 0.0)
    out = q.new_zeros(num_kv_heads, n, group, dv)
    start = max(0, n - length)
    while start < n:
        position = length - n + start
        stop = min(n, start + _TILE - position % _TILE)
        # The same for every row of the tile, also where it is cut by a chunk.
        oldest = max(0, position // _TILE * _TILE - window)
        causal = layer.causal and tree is None
        seen = slice(oldest, length - n + stop if causal else length)
        rows = torch.arange(start, stop, device=q.device) + (length - n)
        columns = torch.arange(seen.start, seen.stop, device=q.device)
        hidden = columns < rows[:, None] - window  # [rows, seen]
        if causal:
            hidden |= columns > rows[:, None]
        if tree is not None:
            new = columns - (length - n)
            shown = tree[start:stop, None] >> new.clamp(0, 63) & 1
            hidden |= (new >= 0) & (shown == 0)
        scores = (q[:, start:stop].flatten(1, 2) @ k[..., seen]).unflatten(1, (-1, group))
        added = None if bias is None else _bias(bias[:, start:stop], rows[:, None] - columns)
        p = _probabilities(scores, hidden, layer, added)
        part = (p.flatten(1, 2) @ clean[:, seen]).unflatten(1, (-1, group))
        if not finite:
            reached = (~hidden).float() @ bad[:, seen].float() > 0  # [Hkv, rows, Dv]
            part = part.masked_fill(reached[:, :, None], torch.nan)
        out[:, start:stop] = part
        start = stop
    return _finite_or_nan(out).transpose(0, 1).reshape(n, num_q_heads, dv)


def _finite_or_nan(x: torch.Tensor) -> torch.Tensor:
    """x, with infinities made NaN: a sum that took in something infinite says nothing."""
    return x.masked_fill(~torch.isfinite(x), torch.nan)


def _bias(bias: torch.Tensor | None, distance: torch.Tensor) -> torch.Tensor | None:
    """``[Hkv, rows, group, extent]`` at distances ``[rows, seen]``, 0 beyond the extent."""
    if bias is None:
        return None
    extent = bias.shape[-1]
    index = distance.clamp(0, extent - 1)[:, None].expand(*bias.shape[:-1], -1)
    outside = (distance < 0) | (distance >= extent)
    return bias.gather(-1, index).masked_fill(outside[:, None], 0.0)


def _probabilities(
    scores: torch.Tensor,
    hidden: torch.Tensor | None,
    layer: LayerAttention,
    added: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax of scaled scores ``[Hkv, rows, group, seen]``, 0 where ``hidden [rows, seen]``."""
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if added is not None:
        scores = scores + added
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if layer.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = layer.sinks.float().view(scores.shape[0], 1, -1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _check_shapes(
    query: Query,
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    layout, shape = cache.layout, tuple(query.data.shape)
    if len(shape) != 3 or shape[2] != layout.k_head_dim or shape[1] % layout.num_kv_heads:
        expected = f"[T, a multiple of {layout.num_kv_heads}, {layout.k_head_dim}]"
        raise InvalidTensorError("query", "shape", expected, shape)
    if tuple(out.shape) != (*shape[:2], layout.v_head_dim):
        expected_out = (*shape[:2], layout.v_head_dim)
        raise InvalidTensorError("out", "shape", expected_out, tuple(out.shape))
    batch = seq_lens.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != batch:
        raise InvalidTensorError("page_table", "shape", f"[{batch}, pages]", page_table.shape)
    if tuple(qo_indptr.shape) != (batch + 1,):
        raise InvalidTensorError("qo_indptr", "shape", (batch + 1,), tuple(qo_indptr.shape))
