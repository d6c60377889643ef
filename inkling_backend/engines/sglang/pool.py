"""The engine's KV pool over block-scaled pages.

Only the buffers differ from the engine's own pool, so it subclasses that one: allocators, radix
cache and every ``isinstance`` check see the ordinary multi-head pool. What would read or move raw
rows without their scales is overridden or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from inkling_backend.attention import AttentionRunner
from inkling_backend.cache.pool import KVCachePool, SlotRows
from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES, Flags
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import Recipe, get_recipe
from inkling_backend.formats.layout import CacheLayout, LayerCache

# `kv_cache_dtype_str` of a runner whose pool is an InklingKVPool: a name of its own, so that none
# of the engine's branches for "mxfp8" or "nvfp4" pools is taken.
DTYPE_PREFIX = "inkling_"


def pool_dtype_name(recipe: Recipe) -> str:
    """The engine's ``kv_cache_dtype_str`` for a pool of this recipe."""
    return DTYPE_PREFIX + recipe.name


def recipe_of(kv_cache_dtype_str: str | None) -> Recipe | None:
    """The recipe of a runner, None if its pool is the engine's own."""
    if kv_cache_dtype_str is None or not kv_cache_dtype_str.startswith(DTYPE_PREFIX):
        return None
    return get_recipe(kv_cache_dtype_str.removeprefix(DTYPE_PREFIX))


def layout_of(
    recipe: Recipe, model_config: Any, page_size: int, sink_tokens: int = 0
) -> CacheLayout:
    """Geometry of one rank's pages."""
    return CacheLayout(
        recipe.k,
        recipe.v,
        num_kv_heads=model_config.get_num_kv_heads(versions.active_attention_tp_size()),
        k_head_dim=model_config.head_dim,
        v_head_dim=model_config.v_head_dim,
        page_size=page_size,
        sink_tokens=sink_tokens,
    )


def layouts_of(
    recipe: Recipe, flags: Flags, model_config: Any, page_size: int
) -> tuple[CacheLayout, dict[int, CacheLayout]]:
    """Geometry of most layers' pages, and of those, by number, that have a recipe of their own."""
    scaled, sink_tokens = flags.scaled(recipe), flags.inkling_sink_tokens
    layout = layout_of(scaled, model_config, page_size, sink_tokens)
    own = flags.layer_recipes().items()
    return layout, {layer: layout.with_recipe(recipe) for layer, recipe in own}


def engine_recipe(kv_cache_dtype: str) -> Recipe:
    """The recipe behind the engine's ``--kv-cache-dtype``."""
    return get_recipe(KV_CACHE_DTYPES[kv_cache_dtype])


class InklingKVPool(MHATokenToKVPool):
    """Pages of every layer of this rank.

    Attributes:
        layout: geometry of the pages of most layers.
        layouts: that of every layer of this rank.
        centers, rotates: the key transform.
        centers_are_open: whether the centers may still be fixed (`centers.Centers`).
        pages: the buffers.
        runner: set by the attention backend; writes rows that come through `set_kv_buffer`.
    """

    runner: AttentionRunner | None = None

    def __init__(
        self,
        *args: Any,
        layout: CacheLayout,
        others: Mapping[int, CacheLayout] | None = None,
        centers: bool = False,
        rotates: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            others: layouts of the model's layers, by number, that have not ``layout``.
        """
        self.layout = layout
        self._others = others or {}
        self.centers, self.rotates = centers, rotates
        self.centers_are_open = centers
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        if self.post_capture_active or self.use_hnd:
            raise UnsupportedError(
                "this pool", ["block-scaled pages have one fixed size and a token-major layout"]
            )
        # Layers with a window may have heads of their own, and have a pool of their own then.
        self.layout = replace(self.layout, num_kv_heads=self.head_num)
        slots = self.size + self.page_size
        assert slots % self.page_size == 0, (self.size, self.page_size)
        here = range(self.start_layer, self.start_layer + self.layer_num)
        self.pages = KVCachePool(
            self.layout,
            self.layer_num,
            slots // self.page_size,
            self.device,
            self._allocate,
            others={i: self._others[n] for i, n in enumerate(here) if n in self._others},
            centers=self.centers,
            rotates=self.rotates,
        )
        self.layouts = self.pages.layouts
        layers = [self.pages.layer(i) for i in range(self.layer_num)]
        self.k_buffer = [layer.k_data for layer in layers]
        self.v_buffer = [layer.v_data for layer in layers]
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.store_dtype = self.layout.k_format.data_dtype
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _allocate(self, *shape: Any, **options: Any) -> torch.Tensor:
        """`torch.zeros` in memory that the engine can take away while the server sleeps."""
        custom_pool = (
            torch.cuda.use_mem_pool(self.custom_mem_pool)
            if self.enable_custom_mem_pool
            else nullcontext()
        )
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), custom_pool:
            return torch.zeros(*shape, **options)

    def _init_kv_copy_and_warmup(self) -> None:
        """The engine's copy of rows has nothing to do here: `move_kv_cache` copies scales, too."""
        self._kv_copy_config = None

    def _clear_buffers(self) -> None:
        del self.pages, self.k_buffer, self.v_buffer

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V; scales, centers and sink tokens included."""
        tokens, k, v = self.size + self.page_size, 0, 0
        for layout in self.layouts:
            rows = tokens * layout.num_kv_heads
            k += rows * layout.k_format.row_bytes(layout.k_head_dim)
            k += layout.center_bytes if self.centers else 0
            v += rows * layout.v_format.row_bytes(layout.v_head_dim)
            kept = rows // self.page_size * layout.sink_tokens * torch.bfloat16.itemsize
            k += kept * layout.k_head_dim
            v += kept * layout.v_head_dim
        return k, v

    def layer(self, layer_id: int) -> LayerCache:
        """Buffers of one of the model's layers."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self.pages.layer(layer_id - self.start_layer)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Quantize and store rows; the checkpoint's ``k_scale`` and ``v_scale`` are not needed."""
        if dcp_kv_mask is not None:
            self._refuse("decode context parallelism")
        assert self.runner is not None, "the attention backend is not initialised yet"
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        slots = unwrap_write_loc(loc_info)[0]
        self.runner.store(self.layer(layer_id), cache_k, cache_v, slots, None)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots to slots in every layer, scales included."""
        self.pages.copy_slots(tgt_loc, src_loc)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> list[SlotRows]:
        """Rows of these slots on the host, scales included, for `load_cpu_copy`."""
        # They come back under the centers that they have now.
        self.centers_are_open = False
        return self.pages.export_slots(torch.as_tensor(indices, device=self.device))

    def load_cpu_copy(
        self,
        kv_cache_cpu: list[SlotRows],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Put rows from `get_cpu_copy` into these slots."""
        self.pages.import_slots(torch.as_tensor(indices, device=self.device), kv_cache_cpu)

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes of one layer's data buffers."""
        return self.k_buffer[0].shape, self.v_buffer[0].shape

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{what}: the rows of this pool are {self.layout.k_format.name} codes with scales "
            "beside them; read them with inkling_backend.kernels.gather"
        )

    def _get_key_buffer(self, layer_id: int) -> NoReturn:
        self._refuse("the key buffer as plain rows")

    def _get_value_buffer(self, layer_id: int) -> NoReturn:
        self._refuse("the value buffer as plain rows")

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, bytes and bytes of a page of every buffer, scales included.

        In the order of `KVCachePool.transfers`, so that the first half is of K. Global scales are
        not among them: they are the same in every process.
        """
        buffers = self.pages.transfers()
        return (
            [buffer.tensor.data_ptr() for buffer in buffers],
            [buffer.tensor.nbytes for buffer in buffers],
            [buffer.bytes_per_page for buffer in buffers],
        )

    def get_device_pool_infos(self) -> NoReturn:
        """Refused: the host tier would drop the scales."""
        self._refuse("host-tier copies")

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it would drop the scales."""
        self._refuse("a prefix-valid commit")
