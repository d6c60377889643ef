"""Settings: a way to keep K, V and Q, with the transforms that go before it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.errors import UnknownNameError
from inkling_backend.formats import (
    RECIPES,
    Format,
    Quantized,
    Recipe,
    ScaleOrder,
    parse_layer_recipes,
)
from inkling_backend.formats.elements import decode_e4m3, encode_e4m3
from inkling_backend.formats.layout import SINKS, parse_sinks, sink_bits


def _fp8(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    return Quantized(encode_e4m3(x.float()), None)


def _from_fp8(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    return decode_e4m3(q.data)


# For comparison: the engine's own FP8 cache with the scale 1 that it takes without calibration.
FP8_PER_TENSOR = Format(
    "fp8_per_tensor",
    codes="e4m3",
    element_bits=8,
    block=0,
    one_scale=0,
    has_global_scale=False,
    k_order=ScaleOrder.TOKEN_MAJOR,
    v_order=ScaleOrder.TOKEN_MAJOR,
    quantize=_fp8,
    dequantize=_from_fp8,
)

BASES: dict[str, Recipe] = {
    "bf16": RECIPES["bf16"],
    "fp8_per_tensor": Recipe("fp8_per_tensor", FP8_PER_TENSOR, FP8_PER_TENSOR),
    "mxfp8": RECIPES["mxfp8"].with_mxfp8_query(),
    "mxfp8_q_bf16": RECIPES["mxfp8"],
    "k_mxfp8_v_nvfp4": RECIPES["mxfp8-nvfp4"],
    "nvfp4": RECIPES["nvfp4"],
    "kvfp4": RECIPES["kvfp4"],
    "mxfp4_block32": RECIPES["mxfp4"],
}
# Transform after a plus sign -> what it does.
TRANSFORMS = {
    "center": "one constant vector less from every key",
    "rotate": "K and Q multiplied by a Hadamard matrix",
    "fouroversix": "NVFP4 blocks scaled to 4 or 6, whichever errs less",
}
# And layers with recipes of their own, as `parse_layer_recipes` reads them.
LAYERS = "layers(LAYERS:RECIPE,...)"
_LAYERS = re.compile(r"layers\((.*)\)")
_BEST = "+center+rotate"
_FIRST = ("+sinks1", "+sinks4")
DEFAULT_SETTINGS = (
    *BASES,
    "mxfp8+center+rotate",
    *(f"mxfp8_q_bf16{more}" for more in ("+center", "+rotate", _BEST)),
    *(f"mxfp8_q_bf16{_BEST}{more}" for more in _FIRST),
    *(f"k_mxfp8_v_nvfp4{more}" for more in ("+fouroversix", _BEST)),
    *(f"k_mxfp8_v_nvfp4{_BEST}+fouroversix{more}" for more in ("", *_FIRST)),
    *(f"nvfp4{more}" for more in ("+center", "+rotate", _BEST, "+fouroversix")),
    *(f"nvfp4{_BEST}+fouroversix{more}" for more in ("", *_FIRST)),
    *(f"kvfp4{_BEST}{more}" for more in ("", *_FIRST)),
)
QUICK_SETTINGS = ("fp8_per_tensor", "mxfp8", "k_mxfp8_v_nvfp4", "nvfp4", "kvfp4")


@dataclass(frozen=True)
class Setting:
    """How a simulated cache keeps what a model gives it.

    Attributes:
        name: base and transforms as in `parse`.
        recipe: formats of K and V, and whether Q is quantized.
        centers, rotates: the transforms, see `TRANSFORMS`.
        sink_tokens: first tokens of a sequence that are kept in BF16.
        layers: recipes of the layers, by number, that have one of their own.
    """

    name: str
    recipe: Recipe
    centers: bool = False
    rotates: bool = False
    sink_tokens: int = 0
    layers: Mapping[int, Recipe] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The name without transforms."""
        return self.name.partition("+")[0]

    def recipe_of(self, layer: int) -> Recipe:
        """The recipe of one layer."""
        return self.layers.get(layer, self.recipe)

    def bits(self, layers: int) -> float:
        """Bits per element of a cache, K and V together, with the sink tokens of every page.

        Args:
            layers: of the model.

        Raises:
            AccuracyError: the model lacks a layer that has a recipe of its own.
        """
        if self.layers and max(self.layers) >= layers:
            raise AccuracyError(
                f"setting {self.name!r}: layer {max(self.layers)} is named, but the model has "
                f"layers 0 to {layers - 1}"
            )
        recipes = [self.recipe_of(layer) for layer in range(layers)]
        sinks = sink_bits(self.sink_tokens) * sum(recipe.is_quantized for recipe in recipes)
        return (sum(recipe.bits_per_element for recipe in recipes) + sinks) / layers


def parse(name: str) -> Setting:
    """The setting ``BASE[+TRANSFORM...]``; BASE is one of `BASES`, or a recipe's name.

    Raises:
        UnknownNameError: a part of the name is not known.
        LayerRecipesError: layers with recipes of their own cannot be read.
        AccuracyError: four-over-six without NVFP4, sink tokens without block scales.
    """
    base, *transforms = name.split("+")
    by_recipe = {recipe.name: key for key, recipe in reversed(BASES.items())}
    base = by_recipe.get(base, base)
    if base not in BASES:
        raise UnknownNameError("setting", base, tuple(BASES))
    recipe, layers, sink_tokens = BASES[base], {}, 0
    for transform in transforms:
        if match := _LAYERS.fullmatch(transform):
            layers = parse_layer_recipes(match[1])
        elif tokens := parse_sinks(transform):
            sink_tokens = tokens
        elif transform not in TRANSFORMS:
            raise UnknownNameError("transform", transform, (*TRANSFORMS, SINKS, LAYERS))
    if sink_tokens and not recipe.is_quantized:
        raise AccuracyError(
            f"setting {name!r}: +sinks{sink_tokens} goes with a base that has block scales"
        )
    if recipe.quantize_query:
        layers = {layer: each.with_mxfp8_query() for layer, each in layers.items()}
    if "fouroversix" in transforms:
        if not any(each.has_nvfp4 for each in (recipe, *layers.values())):
            raise AccuracyError(f"setting {name!r}: +fouroversix is a rule of NVFP4 blocks")
        recipe = recipe.with_four_over_six()
        layers = {layer: each.with_four_over_six() for layer, each in layers.items()}
    return Setting(
        "+".join((base, *transforms)),
        recipe,
        centers="center" in transforms,
        rotates="rotate" in transforms,
        sink_tokens=sink_tokens,
        layers=layers,
    )
