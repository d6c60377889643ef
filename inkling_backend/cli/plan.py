"""How many tokens and requests fit into a GPU's memory, per recipe.

The bytes come from `CacheLayout.bytes_per_token`, which the pool is sized and built by too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inkling_backend.attention import reasons_against
from inkling_backend.cli.model import ModelShape, PlanError, count_weights
from inkling_backend.errors import UnknownNameError
from inkling_backend.formats import RECIPES, Recipe
from inkling_backend.formats.layout import DEFAULT_PAGE_SIZE, CacheLayout, sink_bits

# Memory that the driver reports as the card's total.
GPU_MEMORY_MIB = {
    "A10": 23028,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "B200": 183359,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40S": 46068,
    "RTX4090": 24564,
    "RTX5090": 32607,
}
FP8 = "fp8"
# Recipes in the order shown, by their bits. FP8 is the engine's own cache, a byte an element, for
# comparison.
_BLOCK_SCALED = [name for name in RECIPES if name != "bf16"]
ORDER = ("bf16", FP8, *sorted(_BLOCK_SCALED, key=lambda name: -RECIPES[name].bits_per_element))
# Their pools are the engine's own, of one format.
_WITHOUT_OTHERS = ("bf16", FP8)
# The engine's default of --swa-full-tokens-ratio: tokens of the pool for layers with a window, over
# those of the pool for the other layers.
_WINDOW_POOL_RATIO = 0.8


@dataclass(frozen=True)
class Row:
    """One recipe: per GPU, ``tokens``, and ``requests`` of the planned context.

    Attributes:
        bytes_per_token: in all layers; of a pool for windows its share of a token.
        window_tokens: tokens of the pool for windows; 0 without one.
        layer_bytes: of a token in one layer.
        reason: why the model cannot have it; then nothing fits.
    """

    recipe: str
    bits_per_element: float
    bytes_per_token: int
    tokens: int
    requests: int
    window_tokens: int = 0
    layer_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """A row for each recipe, and what they share.

    Attributes:
        cache_bytes, weight_bytes: of each GPU.
        notes: what the numbers do not say.
    """

    rows: list[Row]
    cache_bytes: int
    weight_bytes: int
    context: int
    notes: tuple[str, ...]

    def row(self, recipe: str) -> Row:
        """The row of a recipe."""
        return next(row for row in self.rows if row.recipe == recipe)

    def as_json(self) -> dict[str, Any]:
        """The rows as plain data."""
        keys = ("recipe", "bits_per_element", "bytes_per_token", "tokens", "requests")
        return {"recipes": [{key: getattr(row, key) for key in keys} for row in self.rows]}


def gpu_bytes(gpu: str | None, memory_gib: float | None) -> int:
    """Memory of one GPU, from its name or as given.

    Raises:
        PlanError: both or neither is given. UnknownNameError: no such GPU.
    """
    if (gpu is None) == (memory_gib is None):
        raise PlanError("expected one of --gpu and --memory-gib")
    if memory_gib is not None:
        return int(memory_gib * 2**30)
    known = {name.lower(): mib for name, mib in GPU_MEMORY_MIB.items()}
    if str(gpu).lower() not in known:
        raise UnknownNameError("GPU", gpu, tuple(GPU_MEMORY_MIB))
    return known[str(gpu).lower()] * 2**20


def plan(
    shape: ModelShape,
    *,
    memory_bytes: int,
    tp: int = 1,
    context: int | None = None,
    mem_fraction: float = 0.88,
    weight_bytes: int | None = None,
    layer_recipes: Mapping[int, Recipe] | None = None,
    sink_tokens: int = 0,
) -> Plan:
    """What fits on each of ``tp`` GPUs.

    Args:
        memory_bytes: memory of one GPU.
        context: tokens of a request; the model's most if None.
        mem_fraction: share of the memory for weights and cache.
        weight_bytes: bytes of all weights; counted from the configuration if None.
        layer_recipes: of layers that have one of their own beside a quantized recipe.
        sink_tokens: of every page of a quantized recipe (`CacheLayout.sink_tokens`).

    Raises:
        PlanError: the GPUs cannot share the heads, the context is longer than the model's, nothing
            is left for a cache, or the model's layers cannot have recipes of their own.
    """
    layer_recipes = layer_recipes or {}
    if layer_recipes and max(layer_recipes) >= shape.layers:
        raise PlanError(
            f"--layer-recipes names layer {max(layer_recipes)}, but the model has layers 0 to "
            f"{shape.layers - 1}"
        )
    if layer_recipes and shape.window_pool:
        raise PlanError(
            "--layer-recipes over a pool for layers with a window is not served: leave it out"
        )
    if shape.num_q_heads % tp or (shape.num_kv_heads % tp and tp % shape.num_kv_heads):
        raise PlanError(
            f"{tp} GPUs cannot share {shape.num_q_heads} query heads and {shape.num_kv_heads} KV "
            "heads: use a --tp that divides them"
        )
    if context is not None and context > shape.max_context:
        raise PlanError(
            f"requests of {context:,} tokens are longer than the model's most of "
            f"{shape.max_context:,}: use a smaller --context"
        )
    context = context or shape.max_context
    weights = (count_weights(shape) if weight_bytes is None else weight_bytes) // tp
    cache = int(memory_bytes * mem_fraction) - weights
    if cache <= 0:
        raise PlanError(
            f"{weights / 2**30:.1f} GiB of weights leave nothing of "
            f"{memory_bytes * mem_fraction / 2**30:.1f} GiB: use a larger GPU or a larger --tp"
        )
    rows = [
        _row(name, shape, tp, cache, context, {}, 0)
        if name in _WITHOUT_OTHERS
        else _row(name, shape, tp, cache, context, layer_recipes, sink_tokens)
        for name in ORDER
    ]
    return Plan(rows, cache, weights, context, _notes(shape, rows))


def _row(
    name: str,
    shape: ModelShape,
    tp: int,
    cache: int,
    context: int,
    others: Mapping[int, Recipe],
    sink_tokens: int,
) -> Row:
    heads, dims = max(1, shape.num_kv_heads // tp), (shape.head_dim, shape.v_head_dim)
    if name == FP8:
        bits, layer, per_token = 8.0, heads * sum(dims), heads * sum(dims) * shape.layers
    else:
        recipes = [others.get(i, RECIPES[name]) for i in range(shape.layers)]
        kept = sum(recipe.is_quantized for recipe in recipes) * sink_bits(sink_tokens)
        bits = (sum(recipe.bits_per_element for recipe in recipes) + kept) / len(recipes)
        reasons = dict.fromkeys(
            reason
            for recipe in dict.fromkeys([RECIPES[name], *recipes])
            for reason in reasons_against(
                num_q_heads=shape.num_q_heads // tp,
                num_kv_heads=heads,
                k_format=recipe.k,
                v_format=recipe.v,
                k_head_dim=dims[0],
                v_head_dim=dims[1],
                page_size=DEFAULT_PAGE_SIZE,
                dtype=torch.bfloat16,
                quantize_query=recipe.quantize_query,
                capability=None,
            )
        )
        if reasons:
            return Row(name, bits, 0, 0, 0, reason="; ".join(reasons))
        most = RECIPES[name]
        layout = CacheLayout(most.k, most.v, heads, *dims, sink_tokens=sink_tokens)
        layer = layout.bytes_per_token
        per_token = sum(layout.with_recipe(each).bytes_per_token for each in recipes)
    if not shape.window_pool:
        tokens = _whole_pages(cache // per_token)
        return Row(name, bits, per_token, tokens, tokens // context, layer_bytes=layer)
    cost = layer * (shape.full_layers + _WINDOW_POOL_RATIO * shape.window_layers)
    tokens = _whole_pages(int(cache / cost))
    windows = _whole_pages(int(tokens * _WINDOW_POOL_RATIO))
    # A window ends and begins within pages.
    held = min(context, shape.window + 2 * DEFAULT_PAGE_SIZE)
    requests = min(tokens // context, windows // held)
    return Row(name, bits, math.ceil(cost), tokens, requests, windows, layer)


def _whole_pages(tokens: int) -> int:
    return tokens // DEFAULT_PAGE_SIZE * DEFAULT_PAGE_SIZE


def _notes(shape: ModelShape, rows: list[Row]) -> tuple[str, ...]:
    notes = list(shape.refusals)
    if not shape.window_layers:
        return tuple(notes)
    note = f"{shape.window_layers} of {shape.layers} layers see {shape.window:,} tokens"
    if not shape.window_pool:
        return (*notes, f"{note}; their pages are kept for the whole context")
    smaller = shape.full_layers + _WINDOW_POOL_RATIO * shape.window_layers
    notes.append(
        f"{note} and have a pool of their own, of {_WINDOW_POOL_RATIO:g} times the tokens at the "
        f"engine's default --swa-full-tokens-ratio: {shape.layers / smaller:.2f}x the tokens of "
        "one pool (--disable-hybrid-swa-memory), more with a smaller ratio"
    )
    notes += [
        f"{row.recipe}: {row.tokens:,} tokens of {shape.full_layers * row.layer_bytes:,} bytes in "
        f"{shape.full_layers} layers, {row.window_tokens:,} of "
        f"{shape.window_layers * row.layer_bytes:,} bytes in {shape.window_layers} with a window"
        for row in rows
        if not row.reason
    ]
    return tuple(notes)
