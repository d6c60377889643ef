"""Dequantized rows of chosen slots, in plain torch."""

from __future__ import annotations

from typing import Literal

import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.layout import LayerCache
from inkling_backend.formats.spec import Quantized
from inkling_backend.reference.pages import (
    Index,
    first_rows,
    scale_index,
    scale_view,
    side_buffers,
)


def gather(
    slots: torch.Tensor,
    cache: LayerCache,
    side: Literal["k", "v"] = "k",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Read rows back, of sink tokens too those of the cache's own format.

    Args:
        slots: ``[T]`` int32 or int64; slot 0 and negative slots give rows of zeros.
        cache: the layer's buffers.
        side: which of K and V.
        dtype: dtype of the result; values are rounded to it once, from float32.

    Returns:
        ``[T, kv heads, D]``, the global scale included.

    Raises:
        InvalidTensorError, UnknownNameError: slots are not integers ``[T]``; no such side.
    """
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        got = f"{tuple(slots.shape)} {slots.dtype}"
        raise InvalidTensorError("slots", "int32 or int64 of shape", "[T]", got)
    rows = read_rows(slots.clamp(min=0), cache, side)
    return torch.where((slots <= 0)[:, None, None], 0.0, rows).to(dtype)


def read_request(slots: torch.Tensor, cache: LayerCache, name: str, index: Index) -> torch.Tensor:
    """`read_rows` of a request's tokens from position 0 on, sink tokens from their rows in BF16."""
    rows = read_rows(slots, cache, name, index)
    count = min(cache.layout.sink_tokens, slots.shape[0])
    if count:
        first, global_scale = first_rows(cache, name)
        kept = first[slots[0] // cache.layout.page_size, :count].float()
        rows[:count] = kept if global_scale is None else kept * global_scale
    return rows


def read_rows(
    slots: torch.Tensor, cache: LayerCache, name: str, index: Index | None = None
) -> torch.Tensor:
    """float32 ``[T, kv heads, D]`` of slots inside the cache; index: their `scale_index`."""
    side, data, scale, global_scale = side_buffers(cache, name)
    rows = data.index_select(0, slots)
    scales = None
    if scale is not None and side.format.block:
        view = scale_view(cache.layout, side, scale)
        scales = view[scale_index(cache.layout, slots) if index is None else index]
    return side.format.dequantize(Quantized(rows, scales), global_scale)
