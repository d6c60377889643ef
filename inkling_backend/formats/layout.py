"""Page geometry: shapes, byte offsets and bytes per token of one layer's cache.

Every size the package reports, allocates or plans with comes from here.

A *slot* is the place of one token: ``slot = page * page_size + offset``. Data of a slot and head is
one contiguous row; scale bytes live in their own buffer, ordered inside a (page, head) as the
format's `ScaleOrder` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from inkling_backend.errors import InvalidTensorError, UnsupportedError
from inkling_backend.formats.recipe import Recipe
from inkling_backend.formats.spec import Format

# Tokens of a page that may have rows in BF16 beside it, at most.
MOST_SINK_TOKENS = 8
# Tokens of a page that attention serves. Storing alone takes any power of two from 32 on.
PAGE_SIZES = (32, 64, 128)
DEFAULT_PAGE_SIZE = 128


# How names of settings say ``sink_tokens``.
SINKS = "sinksN"


def parse_sinks(text: str) -> int:
    """N of ``sinksN``, 1 to `MOST_SINK_TOKENS`; 0 of any other text."""
    known = {SINKS.replace("N", str(n)): n for n in range(1, MOST_SINK_TOKENS + 1)}
    return known.get(text, 0)


def sink_bits(tokens: int, page_size: int = DEFAULT_PAGE_SIZE) -> float:
    """Bits per element that the rows in BF16 of so many sink tokens of every page add."""
    return 16 * tokens / page_size


def page_size_reason(page_size: int) -> str:
    """Why a server cannot have pages of this size, and what to do."""
    return (
        f"page size {page_size} is not supported: set --page-size to one of "
        f"{', '.join(map(str, PAGE_SIZES))} (unset means {DEFAULT_PAGE_SIZE})"
    )


@dataclass(frozen=True)
class SideLayout:
    """Geometry of K or of V of one layer.

    Attributes:
        format: the number format.
        head_dim: elements of one row.
        scale_strides: byte strides of (t % 32, t // 32, block) inside a (page, head).
    """

    format: Format
    head_dim: int
    scale_strides: tuple[int, int, int]

    @property
    def row_items(self) -> int:
        """Items of the data buffer's dtype in one row."""
        return self.format.data_bytes(self.head_dim) // self.format.data_dtype.itemsize

    @property
    def blocks(self) -> int:
        """Scale bytes of one row."""
        return self.format.scale_bytes(self.head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """Geometry of the pages of a model's layers.

    K and V carry their formats apart. Layers may differ in their formats and, where those with a
    window have a pool of their own, in their number of KV heads; in nothing else. A layer in BF16
    has no sink tokens.

    Attributes:
        sink_tokens: first tokens of every page whose rows are kept in BF16, too. Attention reads
            those of a request's first page, the request's first tokens: attention sinks, whose
            error reaches every output.
    """

    k_format: Format
    v_format: Format
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    page_size: int = DEFAULT_PAGE_SIZE
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        reasons = self.reasons_against(
            self.k_format, self.v_format, self.k_head_dim, self.v_head_dim, self.page_size
        )
        if not 0 <= self.sink_tokens <= MOST_SINK_TOKENS:
            reasons.append(
                f"{self.sink_tokens} sink tokens are asked for: 0 to {MOST_SINK_TOKENS} are kept"
            )
        if self.sink_tokens and not all(fmt.block for fmt in self.formats):
            reasons.append("sink tokens are kept in BF16, which this cache is in: set them to 0")
        if reasons:
            raise UnsupportedError("this cache layout", reasons)

    @staticmethod
    def reasons_against(
        k_format: Format, v_format: Format, k_head_dim: int, v_head_dim: int, page_size: int
    ) -> list[str]:
        """Every reason why such pages cannot exist (empty if they can)."""
        same = (k_format, k_head_dim) == (v_format, v_head_dim)
        reasons = k_format.reasons_against(k_head_dim, "head_dim" if same else "head_dim of K")
        if not same:
            reasons += v_format.reasons_against(v_head_dim, "head_dim of V")
        if page_size < min(PAGE_SIZES) or page_size & (page_size - 1):
            reasons.append(page_size_reason(page_size))
        return reasons

    @property
    def k(self) -> SideLayout:
        """Geometry of K."""
        blocks = self.k_format.scale_bytes(self.k_head_dim)
        strides = self.k_format.k_order.strides(self.page_size, blocks)
        return SideLayout(self.k_format, self.k_head_dim, strides)

    @property
    def v(self) -> SideLayout:
        """Geometry of V."""
        blocks = self.v_format.scale_bytes(self.v_head_dim)
        strides = self.v_format.v_order.strides(self.page_size, blocks)
        return SideLayout(self.v_format, self.v_head_dim, strides)

    @property
    def formats(self) -> tuple[Format, Format]:
        """Of K and of V."""
        return self.k_format, self.v_format

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer, K and V, data and scales, and its share of its
        page's sink tokens, rounded up."""
        rows = self.k_format.row_bytes(self.k_head_dim) + self.v_format.row_bytes(self.v_head_dim)
        return self.num_kv_heads * rows + math.ceil(self.sink_bytes / self.page_size)

    @property
    def sink_bytes(self) -> int:
        """Bytes of the sink tokens' rows in BF16 that go with a page, K and V."""
        return self.sink_tokens * self.bytes_per_token_bf16

    @property
    def bytes_per_token_bf16(self) -> int:
        """What the same token takes in a BF16 cache: the yardstick of every gain."""
        return self.num_kv_heads * 2 * (self.k_head_dim + self.v_head_dim)

    @property
    def center_bytes(self) -> int:
        """Bytes of one layer's center of the keys, float32, where there is one."""
        return self.num_kv_heads * self.k_head_dim * 4

    def with_recipe(self, recipe: Recipe) -> CacheLayout:
        """The same pages in another recipe.

        Raises:
            UnsupportedError: the heads do not fit its formats.
        """
        sink_tokens = self.sink_tokens if recipe.is_quantized else 0
        return replace(self, k_format=recipe.k, v_format=recipe.v, sink_tokens=sink_tokens)

    def data_shape(self, side: SideLayout, num_pages: int) -> tuple[int, int, int]:
        """Shape of a data buffer: (slots, kv heads, items of a row)."""
        return num_pages * self.page_size, self.num_kv_heads, side.row_items

    def scale_shape(self, side: SideLayout, num_pages: int) -> tuple[int, int, int]:
        """Shape of a scale buffer: (pages, kv heads, page_size * blocks) uint8."""
        return num_pages, self.num_kv_heads, self.page_size * side.blocks

    def first_shape(self, side: SideLayout, num_pages: int) -> tuple[int, int, int, int]:
        """Shape of the sink tokens' rows: (pages, sink tokens, kv heads, head_dim) bfloat16."""
        return num_pages, self.sink_tokens, self.num_kv_heads, side.head_dim

    def scale_offsets(self, side: SideLayout, slots: torch.Tensor) -> torch.Tensor:
        """Flat index of every scale byte of the given slots.

        Args:
            slots: ``[T]`` integer slots.

        Returns:
            ``[T, kv heads, blocks]`` int64 indices into the flattened scale buffer.
        """
        lo, hi, step = side.scale_strides
        slots = slots.to(torch.int64)
        page, t = slots // self.page_size, slots % self.page_size
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        blocks = torch.arange(side.blocks, device=slots.device)
        base = (page[:, None] * self.num_kv_heads + heads) * (self.page_size * side.blocks)
        inner = (t % 32) * lo + (t // 32) * hi
        return (base + inner[:, None])[:, :, None] + blocks * step


@dataclass(frozen=True)
class LayerCache:
    """The buffers of one layer.

    k_data, v_data:     ``layout.data_shape`` of K, V.
    k_scale, v_scale:   ``layout.scale_shape`` uint8, or None for a format without scales.
    k_global, v_global: ``[1]`` float32 on the device, or None for a format without a global scale.
    k_center:           ``[kv heads, k_head_dim]`` float32 taken from every stored key, or None.
    rotates:            whether stored keys, and queries that meet them, are rotated.
    k_first, v_first:   ``layout.first_shape`` bfloat16, or None without sink tokens: rows as they
                        were before they were quantized, over the global scale.

    Center and rotation are the key transform (`inkling_backend.transforms`); V has none.
    """

    layout: CacheLayout
    k_data: torch.Tensor
    v_data: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_global: torch.Tensor | None = None
    v_global: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    rotates: bool = False
    k_first: torch.Tensor | None = None
    v_first: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        num_pages = self.k_data.shape[0] // layout.page_size
        for name, side in (("k", layout.k), ("v", layout.v)):
            self._check(f"{name}_data", layout.data_shape(side, num_pages), side.format.data_dtype)
            if side.format.block:
                self._check(f"{name}_scale", layout.scale_shape(side, num_pages), torch.uint8)
            if side.format.has_global_scale:
                self._check(f"{name}_global", (1,), torch.float32)
            if layout.sink_tokens:
                shape = layout.first_shape(side, num_pages)
                self._check(f"{name}_first", shape, torch.bfloat16)
        if self.k_center is not None:
            self._check("k_center", (layout.num_kv_heads, layout.k_head_dim), torch.float32)

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor = getattr(self, name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTensorError(name, "a tensor of shape", shape, tensor)
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            got = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            raise InvalidTensorError(name, "contiguous shape", shape, got)
        if tensor.dtype != dtype:
            raise InvalidTensorError(name, "dtype", dtype, tensor.dtype)
        if tensor.device != self.k_data.device:
            raise InvalidTensorError(name, "device", self.k_data.device, tensor.device)

    @property
    def num_pages(self) -> int:
        """Pages in the buffers, the padding page 0 included."""
        return self.k_data.shape[0] // self.layout.page_size
