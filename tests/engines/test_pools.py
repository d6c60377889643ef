"""What the backend sees of a runner's pools, over stand-ins for the engine's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import get_recipe
from inkling_backend.formats.layout import CacheLayout

PACKAGE = "inkling_backend.engines.sglang"
MXFP8, BF16 = get_recipe("mxfp8"), get_recipe("bf16")


class Plain:
    """The engine's own pool."""

    kv_cache_layout = "nhd"
    dtype = torch.bfloat16
    page_size, head_num = 64, 2

    def __init__(self, layers: int, pages: int) -> None:
        self.layer_num, self.size = layers, pages * self.page_size
        shape = (self.size + self.page_size, self.head_num, 64)
        self.buffers = [
            tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv") for _ in range(layers)
        ]
        self.waited: list[int] = []

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.waited.append(layer_id)
        return self.buffers[layer_id]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return 1000 * self.layer_num, 100 * self.layer_num


class Ours(Plain):
    """`InklingKVPool`; a layer is its name."""

    dtype = torch.uint8
    layout = CacheLayout(MXFP8.k, MXFP8.v, 2, 64, 64, 64)

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        return (self.layout,) * self.layer_num

    def layer(self, layer_id: int) -> str:
        return f"layer {layer_id} of {self.layer_num}"


class Two:
    """The engine's ``SWAKVPool``: layers 1 and 3 have the whole context."""

    page_size = 64

    def __init__(self, full: Any, windows: Any) -> None:
        self.full_kv_pool, self.swa_kv_pool = full, windows
        self.layers_mapping = {1: (0, False), 3: (1, False), 0: (0, True), 2: (1, True)}
        self.full_to_swa_index_mapping = torch.zeros(1, dtype=torch.int64)
        self.waited: list[int] = []

    def _wait_for_layer(self, layer_id: int) -> None:
        self.waited.append(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait_for_layer(layer_id)
        index, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_kv_buffer(index)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        sizes = [part.get_kv_size_bytes() for part in (self.full_kv_pool, self.swa_kv_pool)]
        return sum(k for k, _ in sizes), sum(v for _, v in sizes)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``RunnerPools`` of a pool and the runner's name of its dtype."""
    own = {
        "InklingKVPool": Ours,
        "engine_recipe": lambda name: {"bf16": BF16}[name],
        "recipe_of": lambda name: MXFP8 if name == "inkling_mxfp8" else None,
        "layout_of": lambda recipe, *_: CacheLayout(recipe.k, recipe.v, 2, 64, 64, 64),
    }
    modules = {
        "sglang.srt.mem_cache.memory_pool": {"MHATokenToKVPool": Plain},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": Two},
        f"{PACKAGE}.pool": own,
    }
    parents = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    for name in (*parents, *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.pools", raising=False)
    made = importlib.import_module(f"{PACKAGE}.pools")
    # Forgotten afterwards: it is built on the stand-ins.
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.pools", sys.modules.pop(f"{PACKAGE}.pools"))

    def pools(pool: Any, name: str = "inkling_mxfp8") -> Any:
        runner = SimpleNamespace(token_to_kv_pool=pool, kv_cache_dtype_str=name, model_config=None)
        return made.RunnerPools(runner)

    return pools


def test_one_pool(make: Any) -> None:
    pool = Ours(3, 7)
    pools = make(pool)
    assert (pools.recipe, pools.layout) == (MXFP8, Ours.layout)
    assert (pools.size, pools.window_size) == ((3, 7 * 64), None)
    assert pools.slot_map is None
    assert pools.layer(2) == "layer 2 of 3"
    assert not pools.has_window_slots(2)
    assert pools.nbytes == 3300
    pools.set_runner("runner")
    assert pool.runner == "runner"  # type: ignore[attr-defined]


def test_two_pools(make: Any) -> None:
    pool = Two(Ours(2, 7), Ours(3, 5))
    pools = make(pool)
    assert (pools.size, pools.window_size) == ((2, 7 * 64), (3, 5 * 64))
    assert pools.slot_map is pool.full_to_swa_index_mapping
    assert pools.nbytes == 5500
    # A layer is in its pool by a number of its own, and waits once.
    assert [pools.layer(i) for i in (3, 2)] == ["layer 1 of 2", "layer 1 of 3"]
    assert pool.waited == [3, 2]
    layers = [SimpleNamespace(layer_id=i) for i in (0, 1, 3, 0)]
    assert pools.layers_with_window_slots(layers) == {0}
    pools.set_runner("runner")
    assert pool.full_kv_pool.runner == pool.swa_kv_pool.runner == "runner"


@pytest.mark.parametrize("two", [False, True])
def test_the_engines_own_pools(two: bool, make: Any) -> None:
    pool: Any = Two(Plain(2, 7), Plain(2, 5)) if two else Plain(4, 7)
    pools = make(pool, "bf16")
    assert pools.recipe is BF16
    pools.set_runner("runner")
    cache = pools.layer(3)
    want = pool.full_kv_pool.buffers[1] if two else pool.buffers[3]
    assert cache.k_data is want[0]
    assert cache.v_data is want[1]
    assert pools.layer(3) is cache
    assert pool.waited == [3, 3], "a host tier may load the layer before every call"


def test_layers_with_a_window_may_have_heads_of_their_own(make: Any) -> None:
    class More(Plain):
        head_num = 4

    class OursMore(Ours):
        head_num, layout = 4, replace(Ours.layout, num_kv_heads=4)

    pools = make(Two(Plain(2, 7), More(2, 5)), "bf16")
    assert (pools.layout.num_kv_heads, pools.window_layout.num_kv_heads) == (2, 4)
    assert pools.layer(2).layout is pools.window_layout
    assert pools.layer(3).layout is pools.layout
    pools = make(Two(Ours(2, 7), OursMore(2, 5)))
    assert (pools.layout, pools.window_layout) == (Ours.layout, OursMore.layout)
    assert make(Ours(2, 7)).window_layout == Ours.layout


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (Plain(1, 1), "inkling_mxfp8"),
        (Plain(1, 1), "fp8_e4m3"),
        (Ours(1, 1), "bf16"),
        (Two(Ours(1, 1), Plain(1, 1)), "inkling_mxfp8"),
        (Two(Plain(1, 1), SimpleNamespace(dtype=torch.bfloat16)), "bf16"),
    ],
)
def test_pools_of_another_kind_are_refused(pool: Any, name: str, make: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"the engine keeps its KV cache {name} in a "):
        make(pool, name)
