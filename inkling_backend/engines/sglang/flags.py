"""Options of the backend: their names, values, and how they reach every process.

The cache recipe is expressed in the engine's own ``kv_cache_dtype``, which the engine hands to all
its processes. What has no field of the engine's travels as one attribute on the ``ServerArgs``
record, which the engine pickles whole.
"""

from __future__ import annotations

import argparse
import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from inkling_backend.errors import UnknownNameError
from inkling_backend.formats import RECIPES, Recipe, parse_layer_recipes
from inkling_backend.formats.layout import MOST_SINK_TOKENS

BACKEND = "inkling"

# Values of --kv-cache-dtype that the engine has by itself -> name of the recipe.
_ENGINE_KV_CACHE_DTYPES = {
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "fp4_mx_block16": "kvfp4",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
# Those that it does not have: recipes by their own names.
OWN_KV_CACHE_DTYPES = tuple(
    name for name in RECIPES if name not in _ENGINE_KV_CACHE_DTYPES.values()
)
# --kv-cache-dtype -> name of the recipe.
KV_CACHE_DTYPES = _ENGINE_KV_CACHE_DTYPES | {name: name for name in OWN_KV_CACHE_DTYPES}
# --fp4-kv-cache-recipe -> --kv-cache-dtype: what keeps K or V in 4 bits.
FP4_RECIPES = {name: dtype for dtype, name in KV_CACHE_DTYPES.items() if RECIPES[name].has_fp4}
DEFAULT_KV_CACHE_DTYPE = "mxfp8"
QUERY_DTYPES = ("auto", "mxfp8", "bf16")
KEY_TRANSFORMS = ("none", "rotate", "center", "center+rotate")
NVFP4_SCALES = ("max", "fouroversix")
SINK_TOKENS = range(MOST_SINK_TOKENS + 1)

_ATTRIBUTE = "_inkling_flags"
_pending: contextvars.ContextVar[Flags | None] = contextvars.ContextVar(
    "inkling_flags", default=None
)


@dataclass(frozen=True)
class Flags:
    """The backend's own options, as the user gave them.

    Attributes:
        fp4_kv_cache_recipe: one of `FP4_RECIPES` or None.
        inkling_query_dtype: ``mxfp8`` quantizes the queries in the launch that stores K and V,
            ``auto`` and ``bf16`` keep them in the model's dtype.
        inkling_key_transform: one of `KEY_TRANSFORMS`, what is done to K (and Q) before a format.
        inkling_nvfp4_scale: ``max`` scales a block's maximum to 6, ``fouroversix`` to 4 or 6,
            whichever errs less.
        inkling_layer_recipes: recipes of single layers as `parse_layer_recipes` reads them, or
            None.
        inkling_sink_tokens: one of `SINK_TOKENS`, `CacheLayout.sink_tokens`.
    """

    fp4_kv_cache_recipe: str | None = None
    inkling_query_dtype: str = "auto"
    inkling_key_transform: str = "none"
    inkling_nvfp4_scale: str = "max"
    inkling_layer_recipes: str | None = None
    inkling_sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.fp4_kv_cache_recipe is not None and self.fp4_kv_cache_recipe not in FP4_RECIPES:
            raise UnknownNameError(
                "--fp4-kv-cache-recipe", self.fp4_kv_cache_recipe, tuple(FP4_RECIPES)
            )
        if self.inkling_query_dtype not in QUERY_DTYPES:
            raise UnknownNameError("--inkling-query-dtype", self.inkling_query_dtype, QUERY_DTYPES)
        if self.inkling_key_transform not in KEY_TRANSFORMS:
            raise UnknownNameError(
                "--inkling-key-transform", self.inkling_key_transform, KEY_TRANSFORMS
            )
        if self.inkling_nvfp4_scale not in NVFP4_SCALES:
            raise UnknownNameError("--inkling-nvfp4-scale", self.inkling_nvfp4_scale, NVFP4_SCALES)
        if self.inkling_sink_tokens not in SINK_TOKENS:
            known = tuple(map(str, SINK_TOKENS))
            raise UnknownNameError("--inkling-sink-tokens", self.inkling_sink_tokens, known)
        self.layer_recipes()

    @property
    def any_set(self) -> bool:
        """Whether the user gave one of the backend's own options."""
        return self != Flags()

    @property
    def quantizes_query(self) -> bool:
        """Whether queries become MXFP8."""
        return self.inkling_query_dtype == "mxfp8"

    @property
    def centers_keys(self) -> bool:
        """Whether every key is stored without one constant vector of its layer and head."""
        return "center" in self.inkling_key_transform

    @property
    def rotates_keys(self) -> bool:
        """Whether K and Q are multiplied by the Hadamard matrix."""
        return "rotate" in self.inkling_key_transform

    def layer_recipes(self) -> dict[int, Recipe]:
        """Recipes of the layers that have one of their own, NVFP4 scaled as the flag says.

        Raises:
            LayerRecipesError, UnknownNameError: of `parse_layer_recipes`.
        """
        if self.inkling_layer_recipes is None:
            return {}
        found = parse_layer_recipes(self.inkling_layer_recipes)
        return {layer: self.scaled(recipe) for layer, recipe in found.items()}

    def scaled(self, recipe: Recipe) -> Recipe:
        """A recipe with NVFP4's blocks scaled as the flag says."""
        return recipe.with_four_over_six() if self.four_over_six else recipe

    @property
    def four_over_six(self) -> bool:
        """Whether NVFP4 blocks are scaled to 4 or 6, whichever errs less."""
        return self.inkling_nvfp4_scale == "fouroversix"


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the backend's options to the engine's parser, and its values to the engine's own."""
    for action in parser._actions:
        if action.dest == "kv_cache_dtype" and action.choices is not None:
            action.choices = [*action.choices, *OWN_KV_CACHE_DTYPES]
    group = parser.add_argument_group(f"--attention-backend {BACKEND}")
    group.add_argument(
        "--fp4-kv-cache-recipe",
        choices=tuple(FP4_RECIPES),
        default=None,
        help="Serve from a 4-bit KV cache (mxfp8-nvfp4: K in MXFP8, V in NVFP4); needs "
        "--attention-backend inkling. "
        "Without it the cache is MXFP8 (or what --kv-cache-dtype says).",
    )
    group.add_argument(
        "--inkling-query-dtype",
        choices=QUERY_DTYPES,
        default="auto",
        help="'auto' and 'bf16': keep the queries in the model's dtype; 'mxfp8': quantize them in "
        "the launch that stores K and V, for recipes with K in MXFP8.",
    )
    group.add_argument(
        "--inkling-key-transform",
        choices=KEY_TRANSFORMS,
        default="none",
        help="What is done to keys before they are quantized, in the same launch: 'center' takes "
        "one constant vector a layer and KV head from them, 'rotate' multiplies K and Q by a "
        "Hadamard matrix. Neither changes attention; both make its error smaller.",
    )
    group.add_argument(
        "--inkling-nvfp4-scale",
        choices=NVFP4_SCALES,
        default="max",
        help="How NVFP4 scales its blocks: 'max' puts the largest element at 6; 'fouroversix' at "
        "4 or 6, whichever has less squared error (Four Over Six, arXiv 2512.02010). The cache is "
        "NVFP4 either way; for recipes with NVFP4.",
    )
    group.add_argument(
        "--inkling-layer-recipes",
        metavar="LAYERS:RECIPE,...",
        default=None,
        help="Recipes of single layers, where they differ from that of the cache: "
        "'0-1:mxfp8,29:bf16' keeps layers 0 and 1 in MXFP8 and layer 29 in BF16.",
    )
    group.add_argument(
        "--inkling-sink-tokens",
        type=int,
        choices=SINK_TOKENS,
        default=0,
        help="First tokens of a request (attention sinks) that are read in BF16. The launch that "
        "stores keeps their rows beside every page.",
    )


def take(arguments: dict[str, Any]) -> Flags:
    """Take the backend's options out of keyword arguments and express the recipe in the rest.

    ``arguments`` loses the fields of `Flags`; an unset or ``auto`` ``kv_cache_dtype`` becomes the
    engine's name of the recipe. A ``kv_cache_dtype`` that the user set stays as it is: a conflict
    is one of the reasons that `requirements` reports.
    """
    flags = Flags(
        arguments.pop("fp4_kv_cache_recipe", None),
        arguments.pop("inkling_query_dtype", None) or "auto",
        arguments.pop("inkling_key_transform", None) or "none",
        arguments.pop("inkling_nvfp4_scale", None) or "max",
        arguments.pop("inkling_layer_recipes", None),
        arguments.pop("inkling_sink_tokens", None) or 0,
    )
    recipe = flags.fp4_kv_cache_recipe
    if recipe is not None and arguments.get("kv_cache_dtype") in (None, "auto"):
        arguments["kv_cache_dtype"] = FP4_RECIPES[recipe]
    return flags


def construct(flags: Flags, make: Callable[[], Any]) -> Any:
    """Call ``make`` for a ``ServerArgs`` and attach ``flags`` to it.

    While ``make`` runs, `flags_of` finds the flags too: SGLang 0.5.17 resolves its arguments
    inside the constructor.
    """
    with _constructing(flags):
        server_args = make()
    setattr(server_args, _ATTRIBUTE, flags)
    return server_args


def flags_of(server_args: Any) -> Flags:
    """The backend's options of a ``ServerArgs`` record, defaults if it carries none."""
    return getattr(server_args, _ATTRIBUTE, None) or _pending.get() or Flags()


@contextmanager
def _constructing(flags: Flags) -> Iterator[None]:
    token = _pending.set(flags)
    try:
        yield
    finally:
        _pending.reset(token)
