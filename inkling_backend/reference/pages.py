"""A layer's buffers as torch indexing sees them."""

from __future__ import annotations

import torch

from inkling_backend.errors import UnknownNameError
from inkling_backend.formats.layout import CacheLayout, LayerCache, SideLayout

Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def side_buffers(
    cache: LayerCache, side: str
) -> tuple[SideLayout, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Geometry, data, scales and global scale of ``"k"`` or ``"v"``.

    Raises:
        UnknownNameError: there is no such side.
    """
    if side == "k":
        return cache.layout.k, cache.k_data, cache.k_scale, cache.k_global
    if side == "v":
        return cache.layout.v, cache.v_data, cache.v_scale, cache.v_global
    raise UnknownNameError("side", side, ("k", "v"))


def first_rows(cache: LayerCache, side: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows ``[pages, sink tokens, kv heads, D]`` of ``"k"`` or ``"v"`` of a cache with sink tokens,
    and the global scale that they are divided by."""
    rows, scale = {"k": (cache.k_first, cache.k_global), "v": (cache.v_first, cache.v_global)}[side]
    assert rows is not None, "without sink tokens"
    return rows, scale


def scale_view(layout: CacheLayout, side: SideLayout, scale: torch.Tensor) -> torch.Tensor:
    """The scale buffer as ``[pages, page_size // 32, 32, kv heads, blocks]``, whatever its order.

    Indexed by `scale_index` of slots ``[T]`` it gives their scales ``[T, kv heads, blocks]``.
    """
    pages, heads, page_bytes = scale.shape
    low, high, block = side.scale_strides
    return scale.as_strided(
        (pages, layout.page_size // 32, 32, heads, side.blocks),
        (heads * page_bytes, high, low, page_bytes, block),
    )


def scale_index(layout: CacheLayout, slots: torch.Tensor) -> Index:
    """``[T]`` slots -> (page, offset // 32, offset % 32) of each; the same for K and V."""
    group = slots // 32
    per_page = layout.page_size // 32
    return group // per_page, group % per_page, slots % 32
