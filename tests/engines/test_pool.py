"""The engine's pool around our pages, over as much of the engine as it takes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import RECIPES
from inkling_backend.formats.layout import CacheLayout

SIZE, PAGE, LAYERS = 256, 64, 3
MEMORY = SimpleNamespace(hicache_ratio=2.0, hicache_size=0)
PACKAGE = "inkling_backend.engines.sglang"


class MemorySaver:
    """Knows what was allocated while its region was open."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._open = False

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        assert tag == "kv_cache"
        self._open = True
        yield
        self._open = False

    def noting(self, make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if self._open:
                self.tensors.append(tensor)
            return tensor

        return made


class EnginePool:
    """The part of the engine's ``MHATokenToKVPool`` that our pool builds on."""

    def __init__(self, memory_saver: MemorySaver, start_layer: int) -> None:
        self.size, self.page_size, self.layer_num, self.device = SIZE, PAGE, LAYERS, "cpu"
        self.post_capture_active = self.use_hnd = self.enable_custom_mem_pool = False
        self.memory_saver_adapter, self.start_layer = memory_saver, start_layer
        self.end_layer = start_layer + LAYERS
        self.layer_transfer_counter: Any = None
        self._create_buffers()

    def _create_buffers(self) -> None:
        raise NotImplementedError

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []

    def _init_data_ptrs_and_strides(self) -> None:
        pass


class EngineHostPool:
    """The part of the engine's ``HostKVCache`` that our host pool builds on."""

    def __init__(self, **options: Any) -> None:
        self.options, self.device, self.allocator = options, options["device"], "allocator"
        self.page_size, self.pin_memory = options["page_size"], options["pin_memory"]
        tokens = int(options["device_capacity_tokens"] * options["host_to_device_ratio"])
        self.page_num = tokens // self.page_size + 1
        self.kv_buffer = self.init_kv_buffer()

    def init_kv_buffer(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def destroy(self) -> None:
        self.kv_buffer = []


def allocate_on_host(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: str
) -> torch.Tensor:
    assert (pin_memory, allocator) == (False, "allocator")
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "constants": {"GPU_MEMORY_TYPE_KV_CACHE": "kv_cache"},
        "mem_cache.memory_pool": {"MHATokenToKVPool": EnginePool, "unwrap_write_loc": None},
        "mem_cache.pool_host": {"HostKVCache": EngineHostPool},
        "mem_cache.pool_host.common": {"ALLOC_MEMORY_FUNCS": {"cpu": allocate_on_host}},
        "runtime_context": {"get_memory": lambda: MEMORY},
    }
    for name in contents:
        parts = f"sglang.srt.{name}".split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for name, content in contents.items():
        vars(sys.modules[f"sglang.srt.{name}"]).update(content)
    for name in ("pool", "host_pool"):  # forgotten afterwards: they are built on the fakes
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.{name}", raising=False)
        importlib.import_module(f"{PACKAGE}.{name}")
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", sys.modules.pop(f"{PACKAGE}.{name}"))


def make_pool(
    recipe: str,
    memory_saver: MemorySaver | None = None,
    start_layer: int = 0,
    sink_tokens: int = 0,
) -> Any:
    formats = RECIPES[recipe]
    layout = CacheLayout(formats.k, formats.v, 2, 64, 64, PAGE, sink_tokens)
    pool: Any = sys.modules[f"{PACKAGE}.pool"]
    return pool.InklingKVPool(memory_saver or MemorySaver(), start_layer, layout=layout)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.usefixtures("engine")
def test_what_grows_with_the_pool_can_be_given_away(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the global scales, which nothing writes again, cannot."""
    saver = MemorySaver()
    monkeypatch.setattr(torch, "zeros", saver.noting(torch.zeros))
    monkeypatch.setattr(torch, "ones", saver.noting(torch.ones))
    pages = make_pool(recipe, saver).pages
    given = {tensor.data_ptr() for tensor in saver.tensors}
    assert given == {buffer.tensor.data_ptr() for buffer in pages.buffers()}
    scales = [s.data_ptr() for s in (pages.k_global, pages.v_global) if s is not None]
    assert len(scales) == (2 if recipe == "nvfp4" else 0)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@pytest.mark.usefixtures("engine")
def test_a_transfer_is_told_every_buffer(recipe: str) -> None:
    pool = make_pool(recipe)
    pointers, sizes, page_sizes = pool.get_contiguous_buf_infos()
    buffers = {each.tensor.data_ptr(): each for each in pool.pages.buffers()}
    assert sorted(pointers) == sorted(buffers)
    assert sizes == [buffers[p].tensor.nbytes for p in pointers]
    assert page_sizes == [buffers[p].bytes_per_page for p in pointers]
    assert sum(sizes) == sum(pool.get_kv_size_bytes())
    parts = [buffers[p].part for p in pointers]
    expected = ("k_data", "k_scale", "v_data", "v_scale")
    assert parts == [part for part in expected for _ in range(LAYERS)]


def make_host_pool(pool: Any) -> Any:
    module: Any = sys.modules[f"{PACKAGE}.host_pool"]
    return module.build(kv_pool=pool, page_size=PAGE, use_mla=False)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@pytest.mark.usefixtures("engine")
def test_the_host_tier_keeps_every_byte(recipe: str) -> None:
    """Pages go to the host in all layers, and come back layer by layer into other pages."""
    device = make_pool(recipe)
    host = make_host_pool(device)
    assert host.page_num == 2 * SIZE // PAGE + 1
    for buffer in device.pages.buffers():
        buffer.tensor.view(torch.uint8).random_(0, 256)

    def pages(*numbers: int) -> torch.Tensor:
        return torch.cat([page * PAGE + torch.arange(PAGE) for page in numbers])

    def contents() -> list[torch.Tensor]:
        return [
            each.tensor.view(torch.uint8).view(SIZE // PAGE + 1, -1).clone()
            for each in device.pages.buffers()
        ]

    before = contents()
    host.backup_from_device_all_layer(device, pages(8, 0, 1), pages(2, 3, 4), "direct")
    for buffer in device.pages.buffers():
        buffer.tensor.view(torch.uint8).fill_(0)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, pages(0, 1, 8), pages(1, 2, 4), layer, "direct")
    for was, now in zip(before, contents(), strict=True):
        assert torch.equal(now[[1, 2, 4]], was[[3, 4, 2]])
        assert not now[[0, 3]].any()


@pytest.mark.usefixtures("engine")
def test_sink_tokens_go_with_their_pages() -> None:
    device = make_pool("nvfp4", sink_tokens=4)
    _, sizes, page_sizes = device.get_contiguous_buf_infos()
    assert sum(sizes) == sum(device.get_kv_size_bytes())
    assert sum(page_sizes) == LAYERS * PAGE * device.layout.bytes_per_token
    host, layer = make_host_pool(device), device.pages.layer(1)
    for rows in (layer.k_first, layer.v_first):
        rows.normal_()
    before = layer.k_first.clone(), layer.v_first.clone()
    slots = PAGE * 2 + torch.arange(PAGE)
    host.backup_from_device_all_layer(device, slots, slots, "direct")
    host.load_to_device_per_layer(device, slots, slots + PAGE, 1, "direct")
    for rows, was in zip((layer.k_first, layer.v_first), before, strict=True):
        assert torch.equal(rows[3], was[2])
        assert torch.equal(rows[[0, 1, 2, 4]], was[[0, 1, 2, 4]])
    with pytest.raises(UnsupportedError, match="pages with sink tokens"):
        device.move_kv_cache(slots, slots)


@pytest.mark.parametrize("sink_tokens", [0, 2])
@pytest.mark.usefixtures("engine")
def test_the_host_tiers_memory_is_what_it_says(sink_tokens: int) -> None:
    device = make_pool("mxfp8", sink_tokens=sink_tokens)
    host = make_host_pool(device)
    held = sum(tensor.nbytes for tensor in host.kv_buffer)
    assert held == host.get_size_per_token() * host.page_num * PAGE
    assert host.options["size_per_token"] == host.get_size_per_token()
    host.destroy()
    assert not hasattr(host, "pages")


@pytest.mark.usefixtures("engine")
def test_storage_behind_the_host_tier_is_refused() -> None:
    host = make_host_pool(make_pool("nvfp4"))
    for use in (
        lambda: host.storage_format_tag,
        lambda: host.get_data_page(0),
        lambda: host.get_dummy_flat_data_page(),
        lambda: host.set_from_flat_data_page(0, torch.zeros(1)),
    ):
        with pytest.raises(NotImplementedError, match="storage backend"):
            use()
