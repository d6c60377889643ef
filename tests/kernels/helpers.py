"""Caches and comparisons that the kernel tests share."""

from __future__ import annotations

import dataclasses

import torch

from inkling_backend.formats import FORMATS, Format, get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache, SideLayout
from inkling_backend.formats.nvfp4 import NVFP4_FOUR_OVER_SIX

POISON = 0xA5
FORMAT_NAMES = tuple(FORMATS)
QUANTIZED_NAMES = tuple(name for name, fmt in FORMATS.items() if fmt.block)
FOUR_OVER_SIX = "fouroversix"
# What the store tells apart: readers see nvfp4 in the last one, too.
STORED_NAMES = (*FORMAT_NAMES, FOUR_OVER_SIX)


def format_of(name: str) -> Format:
    """One of `STORED_NAMES`."""
    return NVFP4_FOUR_OVER_SIX if name == FOUR_OVER_SIX else get_format(name)


def make_layout(
    k: str, v: str, heads: int, dk: int, dv: int | None = None, page: int = 32
) -> CacheLayout:
    """A layout by names."""
    return CacheLayout(format_of(k), format_of(v), heads, dk, dv or dk, page)


def make_cache(
    layout: CacheLayout,
    pages: int,
    device: torch.device,
    *,
    k_global: float = 0.37,
    v_global: float = 1.9,
) -> LayerCache:
    """A cache all of whose bytes are poison; different global scales for K and V."""

    def data(side: SideLayout) -> torch.Tensor:
        shape = layout.data_shape(side, pages)
        width = shape[-1] * side.format.data_dtype.itemsize
        poison = torch.full((*shape[:-1], width), POISON, dtype=torch.uint8, device=device)
        return poison.view(side.format.data_dtype)

    def scale(side: SideLayout) -> torch.Tensor | None:
        if not side.format.block:
            return None
        shape = layout.scale_shape(side, pages)
        return torch.full(shape, POISON, dtype=torch.uint8, device=device)

    def first(side: SideLayout) -> torch.Tensor | None:
        if not layout.sink_tokens:
            return None
        shape = layout.first_shape(side, pages)
        width = shape[-1] * torch.bfloat16.itemsize
        poison = torch.full((*shape[:-1], width), POISON, dtype=torch.uint8, device=device)
        return poison.view(torch.bfloat16)

    def scalar(side: SideLayout, value: float) -> torch.Tensor | None:
        return torch.tensor([value], device=device) if side.format.has_global_scale else None

    return LayerCache(
        layout,
        data(layout.k),
        data(layout.v),
        scale(layout.k),
        scale(layout.v),
        scalar(layout.k, k_global),
        scalar(layout.v, v_global),
        k_first=first(layout.k),
        v_first=first(layout.v),
    )


def clone_cache(cache: LayerCache, device: torch.device | None = None) -> LayerCache:
    """A copy with buffers of its own."""
    buffers = {
        field.name: value.to(device or value.device, copy=True)
        for field in dataclasses.fields(cache)
        if isinstance(value := getattr(cache, field.name), torch.Tensor)
    }
    return dataclasses.replace(cache, **buffers)


def assert_same_bits(got: torch.Tensor | None, want: torch.Tensor | None, name: str) -> None:
    """Equal to the bit; floating point NaN equals NaN whatever its payload."""
    assert (got is None) == (want is None), name
    if got is None or want is None:
        return
    assert got.dtype == want.dtype, name
    assert got.shape == want.shape, name
    got, want = got.cpu(), want.cpu()
    if got.dtype.is_floating_point:
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan), f"{name}: NaN in other places"
        integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
        got = torch.where(nan, 0, got.contiguous().view(integer))
        want = torch.where(nan, 0, want.contiguous().view(integer))
    wrong = (got != want).nonzero()
    assert not len(wrong), f"{name}: {len(wrong)} differ, first at {wrong[0].tolist()}"


def assert_same_cache(got: LayerCache, want: LayerCache) -> None:
    """Every byte of every buffer."""
    for name in ("k_data", "v_data", "k_scale", "v_scale", "k_first", "v_first"):
        assert_same_bits(getattr(got, name), getattr(want, name), name)


def special_rows(rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many magnitudes, with every kind of value that conversions stumble over."""
    x = torch.randn(rows, heads, dim) * torch.exp2(torch.randint(-14, 15, (rows, heads, 1)))
    top = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    edges = [float("nan"), -float("nan"), float("inf"), -float("inf"), top, -top, tiny, tiny / 4]
    edges += [-tiny / 8, 0.0, -0.0, 448.0, 449.0, 464.0, -500.0, 1e4, 6.0, 5.0, -5.0, 0.25, 1e-30]
    flat = x.view(-1)
    where = torch.randperm(flat.numel())[: len(edges)]
    flat[where] = torch.tensor(edges)[: len(where)]
    x[0] = 0.0
    if rows > 1:
        x[1] = tiny / 2
    return x.to(dtype)
