"""The cache buffers of one model, in any pair of formats.

Per layer: K and V data, their scale bytes where the format has any, and the rows of sink tokens
where the layout has any, each a tensor of its own. Whatever moves, copies or exports a token takes
its scales along; what moves pages takes their sink tokens along, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from inkling_backend.errors import InvalidTensorError, UnsupportedError
from inkling_backend.formats.layout import CacheLayout, LayerCache, SideLayout
from inkling_backend.formats.spec import Quantized

Allocate = Callable[..., torch.Tensor]


class Buffer(NamedTuple):
    """One buffer of the pool, for those who transfer pages.

    name:           ``layer{i}.{k_data|k_first|k_scale|v_data|v_first|v_scale}``.
    tensor:         the buffer; page p is bytes ``[p * bytes_per_page, (p + 1) * bytes_per_page)``.
    bytes_per_page: a page's bytes, contiguous.
    """

    name: str
    tensor: torch.Tensor
    bytes_per_page: int

    @property
    def part(self) -> str:
        """The name without the layer."""
        return self.name.partition(".")[2]


class SlotRows(NamedTuple):
    """Some tokens of one layer as they are stored.

    k, v: data ``[T, kv heads, row items]`` and scale ``[T, kv heads, blocks]`` uint8 or None.
    """

    k: Quantized
    v: Quantized


class KVCachePool:
    """Buffers of all layers of one model.

    Attributes:
        layout: geometry of the pages of most layers.
        layouts: that of every layer.
        num_layers, num_pages: sizes; page 0, whose slot 0 is padding, is counted.
        k_global, v_global: ``[num_layers]`` float32 on the device, 1.0 at first, or None where no
            layer's format has a global scale. Kernels read them when they run, so that a change in
            place is seen by captured graphs too.
        k_center: ``[num_layers, kv heads, k_head_dim]`` float32 on the device, zero at first, that
            keys are stored without; None without centering. Pages are valid under the center that
            they were stored with alone: it may change only while none is in use.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_layers: int,
        num_pages: int,
        device: torch.device | str,
        allocate: Allocate = torch.zeros,
        *,
        others: Mapping[int, CacheLayout] | None = None,
        centers: bool = False,
        rotates: bool = False,
    ) -> None:
        """Allocates every buffer.

        Args:
            others: layouts of the layers that have not ``layout``; they differ in formats alone.
            allocate: called like `torch.zeros` for what grows with the pool; must give zeroed
                memory (a byte of 0xFF is a NaN) where attention reads the pages. Its contents may
                get lost while no token is kept, those of the global scales and centers may not.
            centers, rotates: the key transform of every layer (`inkling_backend.transforms`).
        """
        self.layout = layout
        self.layouts = tuple((others or {}).get(i, layout) for i in range(num_layers))
        self.num_layers = num_layers
        self.num_pages = num_pages

        def global_scales(sides: Iterable[SideLayout]) -> torch.Tensor | None:
            if not any(side.format.has_global_scale for side in sides):
                return None
            return torch.ones(num_layers, dtype=torch.float32, device=device)

        def data(side: SideLayout) -> torch.Tensor:
            shape = layout.data_shape(side, num_pages)
            return allocate(shape, dtype=side.format.data_dtype, device=device)

        def first(each: CacheLayout, side: SideLayout) -> torch.Tensor | None:
            if not each.sink_tokens:
                return None
            shape = each.first_shape(side, num_pages)
            return allocate(shape, dtype=torch.bfloat16, device=device)

        def scale(side: SideLayout) -> torch.Tensor | None:
            if not side.format.block:
                return None
            shape = layout.scale_shape(side, num_pages)
            scales = allocate(shape, dtype=torch.uint8, device=device)
            # A captured batch pads itself with page 0: a zero byte is a scale that `decode_fast`
            # would have to leave to the exact path, in every step.
            return scales.fill_(side.format.one_scale)

        self.k_global = global_scales(each.k for each in self.layouts)
        self.v_global = global_scales(each.v for each in self.layouts)
        self.k_center = None
        if centers:
            shape = (num_layers, layout.num_kv_heads, layout.k_head_dim)
            self.k_center = torch.zeros(shape, dtype=torch.float32, device=device)
        self._layers = [
            LayerCache(
                each,
                data(each.k),
                data(each.v),
                scale(each.k),
                scale(each.v),
                _entry(self.k_global, i, each.k),
                _entry(self.v_global, i, each.v),
                None if self.k_center is None else self.k_center[i],
                rotates,
                first(each, each.k),
                first(each, each.v),
            )
            for i, each in enumerate(self.layouts)
        ]

    def layer(self, index: int) -> LayerCache:
        """Buffers of one layer."""
        return self._layers[index]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return sum(layout.bytes_per_token for layout in self.layouts)

    @property
    def num_slots(self) -> int:
        """Slots of one layer, those of page 0 included."""
        return self.num_pages * self.layout.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer.

        That is ``bytes_per_token * num_slots`` (less what it rounds up), four bytes per layer for
        each side of which some layer's format has a global scale, and the centers.
        """
        fixed = [self.k_global, self.v_global, self.k_center]
        small = sum(tensor.nbytes for tensor in fixed if tensor is not None)
        return sum(buffer.tensor.nbytes for buffer in self.buffers()) + small

    def buffers(self) -> list[Buffer]:
        """Every buffer that grows with the pool: what a transfer of pages must take along."""
        found = []
        for i, cache in enumerate(self._layers):
            for name, tensor in _parts(cache).items():
                per_page = tensor.nbytes // self.num_pages if self.num_pages else 0
                found.append(Buffer(f"layer{i}.{name}", tensor, per_page))
        return found

    def transfers(self) -> list[Buffer]:
        """`buffers` as an engine describes a pool to another: K's of all layers, then V's.

        The data of all layers come before the rest. A peer of the same layout has the same
        list; page by page, entry i goes to its entry i.
        """
        parts = sorted({buffer.part for buffer in self.buffers()})
        return [each for part in parts for each in self.buffers() if each.part == part]

    def copy_slots(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copies tokens, scales included, from slots ``src`` to slots ``dst``, in every layer.

        Args:
            dst, src: ``[T]`` integer slots on the pool's device; they may overlap. A token whose
                ``dst`` is 0 or negative is skipped.

        Raises:
            UnsupportedError: the layout has sink tokens (of the next two methods, too).
        """
        self._refuse_single_tokens()
        if dst.shape != src.shape or dst.ndim != 1:
            raise InvalidTensorError("src", "shape of dst", tuple(dst.shape), tuple(src.shape))
        real = dst > 0
        dst = torch.where(real, dst, 0).to(torch.int64)
        src = torch.where(real, src, 0).to(torch.int64)
        for cache in self._layers:
            for tensor, to, where in zip(
                self._flat(cache),
                self._indices(cache.layout, dst),
                self._indices(cache.layout, src),
                strict=True,
            ):
                tensor[to] = tensor[where]

    def copy_pages(
        self,
        to: Sequence[int],
        source: KVCachePool,
        pages: Sequence[int],
        layers: Iterable[int] | None = None,
    ) -> None:
        """Copies whole pages, scales included, from another pool, which may be on another device.

        Neighbours are copied at once. Between a GPU and pinned memory nothing waits for the copies:
        they are done when the current stream is.

        Args:
            to, pages: pages of this pool, and those of ``source`` that come there; on the host.
            source: a pool whose layers have the same layouts.
            layers: layers to copy; None for all.
        """
        if len(to) != len(pages):
            raise InvalidTensorError("pages", "pages to copy:", len(to), len(pages))
        if source.layouts != self.layouts:
            got = f"{source.num_layers} layers of {source.layout}"
            raise InvalidTensorError("source", "layers and layout of", self.layout, got)
        runs = _runs(to, pages)
        for layer in range(self.num_layers) if layers is None else layers:
            origins = _parts(source._layers[layer])
            for name, target in _parts(self._layers[layer]).items():
                target = target.view(self.num_pages, -1)
                origin = origins[name].view(source.num_pages, -1)
                for first, from_first, count in runs:
                    there = slice(from_first, from_first + count)
                    target[first : first + count].copy_(origin[there], non_blocking=True)

    def export_slots(self, slots: torch.Tensor) -> list[SlotRows]:
        """The bytes of some tokens in every layer, in CPU memory.

        Args:
            slots: ``[T]`` integer slots on the pool's device.
        """
        self._refuse_single_tokens()
        exported = []
        for cache in self._layers:
            indices = self._indices(cache.layout, slots.to(torch.int64))
            rows = iter([t[i].cpu() for t, i in zip(self._flat(cache), indices, strict=True)])
            sides = [
                Quantized(next(rows), next(rows) if side.format.block else None)
                for side in (cache.layout.k, cache.layout.v)
            ]
            exported.append(SlotRows(*sides))
        return exported

    def import_slots(self, slots: torch.Tensor, rows: Sequence[SlotRows]) -> None:
        """Writes what `export_slots` gave, layer by layer, into other slots.

        Args:
            slots: ``[T]`` integer slots on the pool's device, all positive.
            rows: one entry per layer.
        """
        self._refuse_single_tokens()
        if len(rows) != self.num_layers:
            raise InvalidTensorError("rows", "one entry per layer,", self.num_layers, len(rows))
        for cache, layer_rows in zip(self._layers, rows, strict=True):
            indices = self._indices(cache.layout, slots.to(torch.int64))
            parts = [part for side in layer_rows for part in side if part is not None]
            for tensor, index, part in zip(self._flat(cache), indices, parts, strict=True):
                if part.shape[0] != slots.shape[0] or part.dtype != tensor.dtype:
                    got = f"{tuple(part.shape)} {part.dtype}"
                    raise InvalidTensorError("rows", "tokens", (slots.shape[0],), got)
                tensor[index] = part.to(tensor.device)

    def _refuse_single_tokens(self) -> None:
        if any(layout.sink_tokens for layout in self.layouts):
            reason = "a token that comes to the first places of a page from others has no such row"
            raise UnsupportedError("moving single tokens of pages with sink tokens", [reason])

    def _flat(self, cache: LayerCache) -> list[torch.Tensor]:
        """Buffers of a layer in the order and form that `_indices` indexes."""
        found = []
        for data, scale in ((cache.k_data, cache.k_scale), (cache.v_data, cache.v_scale)):
            found.append(data)
            if scale is not None:
                found.append(scale.view(-1))
        return found

    def _indices(self, layout: CacheLayout, slots: torch.Tensor) -> list[torch.Tensor]:
        """Index of the slots' bytes into each tensor of `_flat`."""
        found = []
        for side in (layout.k, layout.v):
            found.append(slots)
            if side.format.block:
                found.append(layout.scale_offsets(side, slots))
        return found


def _entry(scales: torch.Tensor | None, layer: int, side: SideLayout) -> torch.Tensor | None:
    """The ``[1]`` global scale of a layer, None if its format has none."""
    if scales is None or not side.format.has_global_scale:
        return None
    return scales[layer : layer + 1]


def _parts(cache: LayerCache) -> dict[str, torch.Tensor]:
    """The buffers of a layer that grow with the pool."""
    names = (f"{side}_{part}" for side in "kv" for part in ("data", "scale", "first"))
    parts = {name: getattr(cache, name) for name in names}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _runs(to: Sequence[int], pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first target, first source, pages) of neighbours that stay neighbours."""
    runs: list[tuple[int, int, int]] = []
    for target, origin in zip(to, pages, strict=True):
        if runs and (target, origin) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((target, origin, 1))
    return runs
