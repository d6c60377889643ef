"""Transform and quantize K and V rows (and Q) and scatter them into pages, in plain torch."""

from __future__ import annotations

import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.layout import LayerCache
from inkling_backend.formats.query import Query
from inkling_backend.reference.pages import (
    Index,
    first_rows,
    scale_index,
    scale_view,
    side_buffers,
)
from inkling_backend.transforms.key import KeyTransform


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    cache: LayerCache,
    *,
    q: torch.Tensor | None = None,
    quantize_q: bool = False,
) -> Query | None:
    """Write one row of K and V per token into its slot. Exact; no host synchronisation.

    Args:
        k: ``[T, kv heads, Dk]`` bf16, fp16 or fp32, any strides.
        v: ``[T, kv heads, Dv]`` likewise.
        slots: ``[T]`` int32 or int64; a token whose slot is 0 or negative is skipped. Slots must
            be distinct otherwise.
        cache: the layer's buffers.
        q: ``[T, query heads, Dk]`` or None.
        quantize_q: give Q back in MXFP8 instead of as it is (`make_query`).

    Returns:
        The query, or None if q is None.

    Raises:
        InvalidTensorError: a tensor does not fit the cache.
    """
    layout = cache.layout
    _check_inputs(k, v, slots, q, cache)
    transform = KeyTransform(cache.k_center, cache.rotates)
    if k.shape[0]:
        k = k if transform.is_identity else transform.key(k)
        keep = (slots > 0)[:, None, None]
        targets = slots.clamp(min=0).long()
        index = scale_index(layout, targets)
        for rows, side in ((k, "k"), (v, "v")):
            _scatter(rows, keep, targets, index, cache, side)
            if layout.sink_tokens:
                _keep_first(rows, slots, cache, side)
    if q is None:
        return None
    return make_query(q, cache, quantize_q=quantize_q)


def make_query(q: torch.Tensor, cache: LayerCache, *, quantize_q: bool) -> Query:
    """Q ``[T, query heads, Dk]`` as attention over this cache reads it: rotated if its keys are,
    in MXFP8 or in q's dtype."""
    rows = KeyTransform(rotates=cache.rotates).query(q) if cache.rotates else q
    return Query.quantize(rows) if quantize_q else Query(rows.to(q.dtype))


def _scatter(
    rows: torch.Tensor,
    keep: torch.Tensor,
    targets: torch.Tensor,
    index: Index,
    cache: LayerCache,
    name: str,
) -> None:
    """Quantize rows and write those of ``keep``; the others write back what slot 0 holds."""
    side, data, scale, global_scale = side_buffers(cache, name)
    new = side.format.quantize(rows, global_scale)
    data.index_copy_(0, targets, torch.where(keep, new.data, data[0]))
    if scale is not None and new.scale is not None:
        view = scale_view(cache.layout, side, scale)
        view[index] = torch.where(keep, new.scale, view[0, 0, 0])


def _keep_first(rows: torch.Tensor, slots: torch.Tensor, cache: LayerCache, name: str) -> None:
    """Write rows of the first tokens of pages in BF16; the others write back what slot 0 has."""
    first, global_scale = first_rows(cache, name)
    layout, first = cache.layout, first.flatten(0, 1)
    offset = slots % layout.page_size
    keep = (slots > 0) & (offset < layout.sink_tokens)
    places = torch.where(keep, slots // layout.page_size * layout.sink_tokens + offset, 0).long()
    rows = rows.float() if global_scale is None else rows.float() / global_scale
    kept = torch.where(keep[:, None, None], rows.to(torch.bfloat16), first[0])
    first.index_copy_(0, places, kept)


def _check_inputs(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None,
    cache: LayerCache,
) -> None:
    layout, tokens = cache.layout, slots.shape[0] if slots.ndim == 1 else None
    if tokens is None:
        raise InvalidTensorError("slots", "shape", "[T]", tuple(slots.shape))
    if slots.dtype not in (torch.int32, torch.int64):
        raise InvalidTensorError("slots", "dtype", "int32 or int64", slots.dtype)
    expected = {
        "k": (k, (tokens, layout.num_kv_heads, layout.k_head_dim)),
        "v": (v, (tokens, layout.num_kv_heads, layout.v_head_dim)),
    }
    if q is not None:
        heads = q.shape[1] if q.ndim == 3 else 0
        expected["q"] = (q, (tokens, heads, layout.k_head_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InvalidTensorError(name, "shape", shape, tuple(tensor.shape))
        if not tensor.dtype.is_floating_point:
            raise InvalidTensorError(name, "dtype", "bf16, fp16 or fp32", tensor.dtype)
    for name, tensor in (("k", k), ("v", v), ("slots", slots)):
        if tensor.device != cache.k_data.device:
            raise InvalidTensorError(name, "device", cache.k_data.device, tensor.device)
