"""How many tokens and requests fit into a GPU's memory, per recipe.

The bytes come from `CacheLayout`, which the pool is sized by too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inkling_backend.errors import InklingError, UnknownNameError
from inkling_backend.formats import RECIPES
from inkling_backend.formats.layout import DEFAULT_PAGE_SIZE, CacheLayout

# Memory that the driver reports as the card's total.
GPU_MEMORY_MIB = {
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40S": 46068,
    "RTX4090": 24564,
}
# Recipes in the order shown. FP8 is the engine's own cache of one byte an element, for comparison.
ORDER = ("bf16", "fp8", "mxfp8", "mxfp8-nvfp4", "nvfp4", "kvfp4")


class PlanError(InklingError, ValueError):
    """The model's configuration or the memory asked for cannot be planned with."""


@dataclass(frozen=True)
class ModelShape:
    """What the cache of a model depends on.

    Attributes:
        full_layers, window_layers: layers whose cache grows with the context, and layers that keep
            ``window`` tokens; layers without a KV cache are in neither.
        max_context: tokens of the longest request.
        config: the text model's configuration.
    """

    name: str
    full_layers: int
    window_layers: int
    window: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_context: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One recipe: per GPU, ``tokens`` and ``requests`` of the planned context."""

    recipe: str
    bits_per_element: float
    bytes_per_token: int
    tokens: int
    requests: int
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """A row for each recipe, and what they share."""

    rows: list[Row]
    cache_bytes: int
    weight_bytes: int
    context: int

    def row(self, recipe: str) -> Row:
        """The row of a recipe."""
        return next(row for row in self.rows if row.recipe == recipe)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "cache_bytes": self.cache_bytes,
            "weight_bytes": self.weight_bytes,
            "context": self.context,
            "recipes": [
                {key: value for key, value in asdict(row).items() if key != "reason" or value}
                for row in self.rows
            ],
        }


def read_model(path: Path) -> ModelShape:
    """The shape of the model whose ``config.json`` is, or lies in, ``path``.

    Raises:
        PlanError: there is none, it cannot be read, or its attention is not of the ordinary kind.
    """
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        whole = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file}: expected a model's config.json, got {error}") from None
    config = whole.get("text_config") or whole
    if config.get("kv_lora_rank"):
        raise PlanError(f"{file}: MLA models keep another cache, which this backend does not serve")
    try:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
    except KeyError as error:
        raise PlanError(f"{file}: expected the key {error} of a decoder model") from None
    kinds = config.get("layer_types") or ["full_attention"] * layers
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    return ModelShape(
        name=whole.get("_name_or_path") or file.resolve().parent.name,
        full_layers=sum(kind == "full_attention" for kind in kinds),
        window_layers=windowed,
        window=config.get("sliding_window") or config.get("attention_chunk_size") or 0,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        v_head_dim=config.get("v_head_dim") or head_dim,
        max_context=config.get("max_position_embeddings") or 8192,
        config=config,
    )


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


def count_weights(shape: ModelShape) -> int:
    """Bytes of the weights in 16 bits, of a gated dense decoder of this configuration.

    Raises:
        PlanError: the configuration is of another kind (experts, for one).
    """
    c = shape.config
    if any(key in c for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise PlanError("weights of a model with experts are not counted: give --weights-gib")
    try:
        hidden, ffn, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    except KeyError as error:
        raise PlanError(f"no key {error} to count weights by: give --weights-gib") from None
    heads, kv = c["num_attention_heads"], shape.num_kv_heads
    projections = hidden * (2 * heads * shape.head_dim + kv * (shape.head_dim + shape.v_head_dim))
    layer = projections + 3 * hidden * ffn + 2 * hidden
    embeddings = vocab * hidden * (1 if c.get("tie_word_embeddings") else 2)
    return 2 * (c["num_hidden_layers"] * layer + embeddings + hidden)


def plan(
    shape: ModelShape,
    *,
    memory_bytes: int,
    tp: int = 1,
    context: int | None = None,
    mem_fraction: float = 0.88,
    weight_bytes: int | None = None,
) -> Plan:
    """What fits on each of ``tp`` GPUs.

    Args:
        memory_bytes: memory of one GPU.
        context: tokens of a request; the model's most if None.
        mem_fraction: share of the memory for weights and cache.
        weight_bytes: bytes of all weights; counted from the configuration if None.

    Raises:
        PlanError: nothing is left for a cache.
    """
    context = min(context or shape.max_context, shape.max_context)
    weights = (count_weights(shape) if weight_bytes is None else weight_bytes) // tp
    cache = int(memory_bytes * mem_fraction) - weights
    if cache <= 0:
        raise PlanError(
            f"{weights / 2**30:.1f} GiB of weights leave nothing of "
            f"{memory_bytes * mem_fraction / 2**30:.1f} GiB: use a larger GPU or a larger --tp"
        )
    heads = max(1, shape.num_kv_heads // tp)
    rows = [_row(name, shape, heads, cache, context) for name in ORDER]
    return Plan(rows, cache, weights, context)


def _row(name: str, shape: ModelShape, heads: int, cache: int, context: int) -> Row:
    if name == "fp8":
        layer, bits = heads * (shape.head_dim + shape.v_head_dim), 8.0
    else:
        recipe = RECIPES[name]
        dims = shape.head_dim, shape.v_head_dim
        reasons = CacheLayout.reasons_against(recipe.k, recipe.v, *dims, DEFAULT_PAGE_SIZE)
        if reasons:
            return Row(name, 0, 0, 0, 0, "; ".join(reasons))
        layout = CacheLayout(recipe.k, recipe.v, heads, *dims)
        layer = layout.bytes_per_token
        bits = (recipe.k.bits_per_element + recipe.v.bits_per_element) / 2
    per_token = layer * shape.full_layers
    window = min(context, shape.window or context)
    request = per_token * context + layer * shape.window_layers * window
    requests = cache // request
    # With a window a token of context costs less, the longer the request.
    tokens = cache // per_token if not shape.window_layers else cache * context // request
    return Row(name, bits, per_token + layer * shape.window_layers, tokens, requests)
