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

from inkling_backend.formats import RECIPES
from inkling_backend.formats.layout import CacheLayout

SIZE, PAGE, LAYERS = 256, 64, 3
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
        self.layer_transfer_counter: Any = None
        self._create_buffers()

    def _create_buffers(self) -> None:
        raise NotImplementedError

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []

    def _init_data_ptrs_and_strides(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "constants": {"GPU_MEMORY_TYPE_KV_CACHE": "kv_cache"},
        "mem_cache.memory_pool": {"MHATokenToKVPool": EnginePool, "unwrap_write_loc": None},
        "layers.attention.base_attn_backend": {"AttentionBackend": object},
        "layers.radix_attention": {"RadixAttention": object},
    }
    for name, content in contents.items():
        parts = f"sglang.srt.{name}".split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[f"sglang.srt.{name}"]).update(content)
    for name in ("pool", "backend"):  # forgotten afterwards: they are built on the fakes
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.{name}", raising=False)
        importlib.import_module(f"{PACKAGE}.{name}")
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", sys.modules.pop(f"{PACKAGE}.{name}"))


def make_pool(recipe: str, memory_saver: MemorySaver | None = None, start_layer: int = 0) -> Any:
    formats = RECIPES[recipe]
    layout = CacheLayout(formats.k, formats.v, 2, 64, 64, PAGE)
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


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "kvfp4", "mxfp8-nvfp4"])
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


@pytest.mark.usefixtures("engine")
def test_every_call_of_a_layer_waits_for_what_is_loaded_into_it() -> None:
    waits: list[int] = []
    pool = make_pool("mxfp8", start_layer=4)
    pool.layer_transfer_counter = SimpleNamespace(wait_until=waits.append)
    module: Any = sys.modules[f"{PACKAGE}.backend"]
    backend = object.__new__(module.InklingAttnBackend)
    backend.pool, backend._layers = pool, {}
    for layer in (4, 5, 4):
        assert backend._layer(layer) is pool.pages.layer(layer - 4)
    assert waits == [0, 1, 0]


@pytest.mark.usefixtures("engine")
def test_the_engines_own_pool_is_asked_in_every_call_too() -> None:
    formats = RECIPES["bf16"]
    layout = CacheLayout(formats.k, formats.v, 2, 64, 64, PAGE)
    asked: list[int] = []
    buffers = tuple(torch.zeros(SIZE, 2, 64, dtype=torch.bfloat16) for _ in range(2))

    def get_kv_buffer(layer: int) -> tuple[torch.Tensor, ...]:
        asked.append(layer)
        return buffers

    module: Any = sys.modules[f"{PACKAGE}.backend"]
    backend = object.__new__(module.InklingAttnBackend)
    backend.pool, backend._layers = SimpleNamespace(get_kv_buffer=get_kv_buffer), {}
    backend.layout = layout
    assert backend._layer(1) is backend._layer(1)
    assert asked == [1, 1]
