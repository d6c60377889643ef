"""What the engine's sizing of pools must know: bytes per token, and the runner's own buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inkling_backend import env
from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES, flags_of
from inkling_backend.engines.sglang.requirements import uses_backend
from inkling_backend.formats import Recipe
from inkling_backend.formats.layout import CacheLayout

# The engine decides how many requests may run only after it has sized the pools, and by default not
# more than these.
_MOST_REQUESTS = 4096


def _layout(kvc: Any) -> tuple[CacheLayout | None, bool]:
    """Geometry of the cache of a runner of this backend, and whether the pool is ours, too."""
    from inkling_backend.engines.sglang.pool import engine_recipe, layout_of, recipe_of

    name = kvc.kv_cache_dtype_str
    own = recipe_of(name)
    ours = uses_backend(versions.active_attention_backends()) and name in KV_CACHE_DTYPES
    if own is None and not ours:
        return None, False
    layout = layout_of(
        own or engine_recipe(name), kvc.model_config, kvc.page_size, _sink_tokens(own)
    )
    return layout, own is not None


def _sink_tokens(own: Recipe | None) -> int:
    """Of every page of a pool of ours."""
    return flags_of(versions.active_server_args()).inkling_sink_tokens if own else 0


def cell_size(original: Callable[..., int], sizer: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a token in the layers of one pool."""
    layout, own = _layout(kvc)
    if layout is None or not own:
        return original(sizer, kvc, num_layers)
    others = _others(layout)
    if not others:
        return layout.bytes_per_token * num_layers
    layers = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
    assert len(layers) == num_layers, (layers, num_layers)
    return sum(others.get(layer, layout).bytes_per_token for layer in layers)


def _others(layout: CacheLayout) -> dict[int, CacheLayout]:
    """Layouts of the layers, by number, that have a recipe of their own."""
    own = flags_of(versions.active_server_args()).layer_recipes()
    return {layer: layout.with_recipe(recipe) for layer, recipe in own.items()}


def add_draft(result: None, sizer: Any, kvc: Any) -> None:
    """Count a token of the draft model's pool beside the target's, by its own heads and layers."""
    layout, own = _layout(kvc)
    draft = versions.draft_of(kvc) if layout is not None and own else None
    if draft is None:
        return
    config, layers = draft
    sizer._cell_size = sizer._compute_cell_size(kvc, kvc.layer_info.num_effective_layers)
    sizer._cell_size += _draft_layout(kvc, config).bytes_per_token * layers


def _draft_layout(kvc: Any, config: Any) -> CacheLayout:
    from inkling_backend.engines.sglang.pool import engine_recipe, layout_of, recipe_of

    name = kvc.kv_cache_dtype_str
    own = recipe_of(name)
    return layout_of(own or engine_recipe(name), config, kvc.page_size, _sink_tokens(own))


def size_two_pools(result: None, sizer: Any, kvc: Any) -> None:
    """Bytes of a token in a layer of each of two pools."""
    layout, own = _layout(kvc)
    if layout is not None and own:
        versions.set_bytes_per_token(sizer, layout.bytes_per_token)


def without_workspace(available: int, kvc: Any, pre_model_load_memory: Any) -> int:
    """What is left for the pools, be they ours or, for BF16, the engine's, without centers."""
    layout, _ = _layout(kvc)
    if layout is None:
        return available
    centers = flags_of(versions.active_server_args()).centers_keys
    runners = [(kvc.model_config, layout, kvc.model_config.num_hidden_layers)]
    draft = versions.draft_of(kvc)
    if draft is not None:
        config, layers = draft
        runners.append((config, _draft_layout(kvc, config), layers))
    reserved = 0
    for config, geometry, layers in runners:
        reserved += workspace_bytes(kvc, geometry, config)
        reserved += geometry.center_bytes * layers if centers else 0
    return max(0, available - reserved)


def workspace_bytes(kvc: Any, layout: CacheLayout, model: Any) -> int:
    """Upper bound of what the attention runner of a model allocates beside the pools."""
    if kvc.device != "cuda":
        return 0
    import torch

    from inkling_backend.attention import AttentionSpec, flashinfer_extend
    from inkling_backend.attention.triton_path import TritonPath
    from inkling_backend.kernels.arch import capability_of

    heads = model.num_attention_heads // versions.active_attention_tp_size()
    spec = AttentionSpec(
        heads,
        layout,
        kvc.model_dtype,
        quantize_query=False,
        relative_bias=versions.is_inkling(model),
    )
    layouts = dict.fromkeys([layout, *_others(layout).values()])
    requests = versions.active_server_args().max_running_requests or _MOST_REQUESTS
    context, capability = kvc.model_config.context_len, capability_of(torch.device(kvc.device))
    flashinfer = flashinfer_extend.chosen(env.extend(), spec, context, capability)
    reserved, first = 0, None
    for each in layouts:
        path = TritonPath(
            *(replace(spec, layout=each), requests + 1, context),
            *(versions.verified_tokens(), torch.device("meta")),
            capability=capability,
            flashinfer=flashinfer,
            maps_slots=bool(kvc.is_hybrid_swa),
            like=first,
        )
        first = first or path
        reserved += path.workspace_bytes
    return reserved
