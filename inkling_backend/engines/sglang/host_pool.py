"""The host tier (HiCache) of an `InklingKVPool`: the same pages, with their scales, in host memory.

Only this module knows the engine's host pools, which 0.5.17 does not have in this form: it is
imported where one is built.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.runtime_context import get_memory

from inkling_backend.cache.pool import KVCachePool
from inkling_backend.engines.sglang.pool import InklingKVPool


def build(
    *,
    kv_pool: InklingKVPool,
    page_size: int,
    host_size: float | None = None,
    mtp_draft_device_pools: tuple[Any, ...] = (),
    pool_label: str = "kv",
    **geometry: Any,
) -> InklingHostPool:
    """What the engine's ``build_kv_host_pool`` gives, by the server's arguments.

    Args:
        kv_pool: the device pool.
        page_size: tokens of a page.
        host_size: gigabytes; None for what the arguments say.
        mtp_draft_device_pools: must be empty.
        geometry: what the engine knows of its own pools; this one knows it from the device pool.
    """
    assert not mtp_draft_device_pools, "speculative decoding is refused at start"
    memory = get_memory()
    return InklingHostPool(
        kv_pool,
        host_to_device_ratio=memory.hicache_ratio,
        host_size=memory.hicache_size if host_size is None else host_size,
        page_size=page_size,
        pool_label=pool_label,
    )


class InklingHostPool(HostKVCache):
    """Pages in host memory, buffer by buffer as on the device.

    The engine's own host pools copy rows of K and V by kernels of theirs; this one copies whole
    pages of every buffer, so that no format needs a kernel of its own.

    Attributes:
        pages: the buffers.
        layer_num, target_layer_num: layers of this rank; draft layers have no place here.
    """

    def __init__(
        self,
        device_pool: InklingKVPool,
        *,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        pool_label: str = "kv",
    ) -> None:
        """Allocates the pages, pinned where the device pool is on a GPU.

        Args:
            host_to_device_ratio: tokens of this pool for each of the device pool's.
            host_size: gigabytes instead of the ratio, if positive.
            page_size: of the device pool.
            pool_label: for the engine's log.

        Raises:
            ValueError: the host has not enough memory (the engine's own check).
        """
        layout = device_pool.layout
        assert page_size == layout.page_size, (page_size, layout.page_size)
        self._layout, self._layouts = layout, device_pool.layouts
        self._gpu = torch.device(device_pool.device)
        self.layer_num = self.target_layer_num = device_pool.layer_num
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=device_pool.size,
            size_per_token=self.get_size_per_token(),
            start_layer=device_pool.start_layer,
            end_layer=device_pool.end_layer,
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=page_size,
            layout="layer_first",
            pin_memory=self._gpu.type != "cpu",
            device="cpu",
            pool_label=pool_label,
        )

    def get_size_per_token(self) -> int:
        """Bytes of a token in all layers, scales included."""
        return sum(layout.bytes_per_token for layout in self._layouts)

    def init_kv_buffer(self) -> list[torch.Tensor]:
        """Allocate the pages; gives every tensor, which the engine unpins at its end."""
        make = ALLOC_MEMORY_FUNCS[self._gpu.type]

        def allocate(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> torch.Tensor:
            return make(
                shape,
                dtype=dtype,
                device=device,
                pin_memory=self.pin_memory,
                allocator=self.allocator,
            )

        self.pages = KVCachePool(
            *(self._layout, self.layer_num, self.page_num, "cpu", allocate),
            others=dict(enumerate(self._layouts)),
        )
        return [buffer.tensor for buffer in self.pages.buffers()]

    def destroy(self) -> None:
        """Unpin and let go of the pages."""
        super().destroy()
        self.__dict__.pop("pages", None)

    def backup_from_device_all_layer(
        self,
        device_pool: InklingKVPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy pages from the device, in every layer."""
        self.pages.copy_pages(
            self._page_ids(host_indices), device_pool.pages, self._page_ids(device_indices)
        )

    def load_to_device_per_layer(
        self,
        device_pool: InklingKVPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy pages to the device, in one layer."""
        device_pool.pages.copy_pages(
            self._page_ids(device_indices),
            self.pages,
            self._page_ids(host_indices),
            layers=(layer_id,),
        )

    def _page_ids(self, indices: torch.Tensor) -> list[int]:
        """Pages of page-aligned slots, in their order."""
        return (indices[:: self.page_size] // self.page_size).tolist()

    @property
    def storage_format_tag(self) -> NoReturn:
        """Asked for when a storage backend is attached, at the start or while running: refused."""
        self._refuse_storage()

    def _refuse_storage(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "a storage backend behind HiCache is not supported: it would not know pages with scales"
        )

    get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = _refuse_storage
