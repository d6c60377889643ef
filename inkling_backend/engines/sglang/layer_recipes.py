"""What speaks against recipes of single layers (``--inkling-layer-recipes``)."""

from __future__ import annotations

from typing import Any

from inkling_backend import env
from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES, Flags

_WHAT = "--inkling-layer-recipes"


def layer_recipe_reasons(arguments: Any, flags: Flags, model: Any) -> list[str]:
    """Why layers of this model cannot have recipes of their own (empty if they can).

    Args:
        arguments: the engine's arguments.
        flags: the backend's own options.
        model: the engine's model configuration.
    """
    recipes = flags.layer_recipes()
    if not recipes:
        return []
    reasons, layers = [], model.num_hidden_layers
    if beyond := [layer for layer in recipes if layer >= layers]:
        reasons.append(
            f"{_WHAT} names layer {beyond[0]}, but the model has layers 0 to {layers - 1}"
        )
    if KV_CACHE_DTYPES.get(arguments.kv_cache_dtype) == "bf16":
        reasons.append(
            f"{_WHAT} with --kv-cache-dtype bf16, whose pool is the engine's own: take a recipe "
            "of fewer bits for the cache, and name the layers that stay in bf16"
        )
    if flags.quantizes_query and not all(each.takes_mxfp8_query for each in recipes.values()):
        reasons.append(
            f"--inkling-query-dtype mxfp8 needs K in MXFP8 in every layer, but {_WHAT} is "
            f"{flags.inkling_layer_recipes}: leave one of them out"
        )
    if versions.windows_have_a_pool(arguments, model):
        reasons.append(
            f"{_WHAT} over a pool for layers with a window: set --disable-hybrid-swa-memory"
        )
    if getattr(arguments, "speculative_algorithm", None):
        reasons.append(f"{_WHAT} with a draft model, whose layers it would name too: leave one out")
    if env.asks_for_fa4():
        reasons.append(f"{_WHAT} with INKLING_KERNELS=fa4, which reads MXFP8 alone: unset one")
    return reasons
