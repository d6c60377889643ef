"""The pool of a model runner, or its two: one for layers with a window, one for the others.

In two pools (the engine's ``SWAKVPool``, unless ``--disable-hybrid-swa-memory``) a token has a slot
in each. The engine hands out those of the first and keeps a map to those of the second; entries
are 0 for pages that it gave back because every window has passed them. The map is filled in place
and never moves, so that a captured graph can read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from inkling_backend.attention import AttentionRunner
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES
from inkling_backend.engines.sglang.pool import (
    InklingKVPool,
    engine_recipe,
    layout_of,
    recipe_of,
)
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats.layout import LayerCache


class PoolSize(NamedTuple):
    """Layers and tokens of one pool; the padding page is not counted."""

    layers: int
    tokens: int


class RunnerPools:
    """What the backend needs of a model runner's pools.

    Attributes:
        recipe, layout: of most layers.
        layouts: the layout of every layer in the pool that holds every token.
        window_layout: of layers in the pool for those with a window, which may have heads of their
            own; ``layout`` where there is one pool.
        size: of the pool that holds every token of a request.
        window_size: of the pool for layers with a window; None where there is one pool.
    """

    def __init__(self, model_runner: Any) -> None:
        """
        Raises:
            UnsupportedError: the engine keeps the cache in pools of another kind.
        """
        pool, name = model_runner.token_to_kv_pool, model_runner.kv_cache_dtype_str
        self._pool = pool
        self._hybrid = isinstance(pool, SWAKVPool)
        parts = [pool.full_kv_pool, pool.swa_kv_pool] if self._hybrid else [pool]
        recipe = recipe_of(name)
        if recipe is not None and all(isinstance(part, InklingKVPool) for part in parts):
            self.recipe, self.layout = recipe, parts[0].layout
            self.layouts, self.window_layout = parts[0].layouts, parts[-1].layout
        elif recipe is None and name in KV_CACHE_DTYPES and all(map(_is_plain_bf16, parts)):
            self.recipe = engine_recipe(name)
            self.layout = layout_of(self.recipe, model_runner.model_config, pool.page_size)
            self.layouts = (self.layout,) * parts[0].layer_num
            self.window_layout = replace(self.layout, num_kv_heads=parts[-1].head_num)
        else:
            kinds = " and ".join(f"a {type(part).__name__} of {part.dtype}" for part in parts)
            raise UnsupportedError(
                "this model", [f"the engine keeps its KV cache {name} in {kinds}"]
            )
        self._parts = parts
        self._plain: dict[int, LayerCache] = {}
        self.size, *windows = [PoolSize(part.layer_num, part.size) for part in parts]
        self.window_size: PoolSize | None = windows[0] if windows else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers but those with a pool for windows."""
        return sum(layout.bytes_per_token for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, scales and padding pages included."""
        return sum(self._pool.get_kv_size_bytes())

    @property
    def slot_map(self) -> torch.Tensor | None:
        """``[slots + 1]`` int64, slot in the pool for windows of each slot; None with one pool."""
        return self._pool.full_to_swa_index_mapping if self._hybrid else None

    def set_runner(self, runner: AttentionRunner) -> None:
        """What stores rows that come through the engine's ``set_kv_buffer``."""
        for part in self._parts:
            if isinstance(part, InklingKVPool):
                part.runner = runner

    def has_window_slots(self, layer_id: int) -> bool:
        """Whether a layer's pages lie in the pool for windows."""
        return self._hybrid and bool(self._pool.layers_mapping[layer_id][1])

    def layers_with_window_slots(self, layers: Iterable[Any]) -> frozenset[int]:
        """Numbers of those of the engine's layers."""
        return frozenset(
            layer.layer_id for layer in layers if self.has_window_slots(layer.layer_id)
        )

    def layer(self, layer_id: int) -> LayerCache:
        """Buffers of one of the model's layers; the pool waits for what is being loaded there."""
        pool = self._pool
        if not self.recipe.k.block:
            buffers = pool.get_kv_buffer(layer_id)
            if layer_id not in self._plain:
                windowed = self.has_window_slots(layer_id)
                layout = self.window_layout if windowed else self.layout
                self._plain[layer_id] = LayerCache(layout, *buffers)
            return self._plain[layer_id]
        if not self._hybrid:
            return pool.layer(layer_id)
        pool._wait_for_layer(layer_id)
        index, windowed = pool.layers_mapping[layer_id]
        return self._parts[int(windowed)].layer(index)


def _is_plain_bf16(pool: Any) -> bool:
    plain = isinstance(pool, MHATokenToKVPool) and pool.kv_cache_layout == "nhd"
    return plain and pool.dtype == torch.bfloat16
