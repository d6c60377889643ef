"""Named formats and recipes: what a user chooses by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from inkling_backend.errors import LayerRecipesError, UnknownNameError
from inkling_backend.formats.bf16 import BF16
from inkling_backend.formats.kvfp4 import KVFP4
from inkling_backend.formats.mxfp4 import MXFP4
from inkling_backend.formats.mxfp8 import MXFP8
from inkling_backend.formats.nvfp4 import NVFP4, NVFP4_FOUR_OVER_SIX
from inkling_backend.formats.spec import Format

FORMATS: dict[str, Format] = {f.name: f for f in (MXFP8, NVFP4, KVFP4, MXFP4, BF16)}


def get_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        UnknownNameError: there is none; the message lists those there are.
    """
    if name not in FORMATS:
        raise UnknownNameError("format", name, tuple(FORMATS))
    return FORMATS[name]


@dataclass(frozen=True)
class Recipe:
    """How a model's K, V and Q are kept.

    Attributes:
        name: the name used in flags, logs and results: the format's, or those of K and of V
            joined by a dash.
        k, v: formats of K and of V.
        quantize_query: whether Q becomes MXFP8 in the launch that stores K and V; no recipe of
            `RECIPES` does it by itself.
    """

    name: str
    k: Format
    v: Format
    quantize_query: bool = False

    @property
    def bits_per_element(self) -> float:
        """Bits per element of K and V together, scales included."""
        return (self.k.bits_per_element + self.v.bits_per_element) / 2

    @property
    def is_quantized(self) -> bool:
        """Whether K and V are in formats with block scales, not in BF16."""
        return bool(self.k.block and self.v.block)

    @property
    def takes_mxfp8_query(self) -> bool:
        """Whether Q may be MXFP8: where K is, so that both sides of a product are of one format."""
        return self.k is MXFP8

    def with_mxfp8_query(self) -> Recipe:
        """The recipe with queries in MXFP8; itself where it takes none."""
        return replace(self, quantize_query=self.takes_mxfp8_query)

    @property
    def has_fp4(self) -> bool:
        """Whether K or V is kept in elements of 4 bits."""
        return 4 in (self.k.element_bits, self.v.element_bits)

    @property
    def has_nvfp4(self) -> bool:
        """Whether K or V is in NVFP4, whose blocks can be scaled to 4 or to 6."""
        return NVFP4.name in (self.k.name, self.v.name)

    def with_four_over_six(self) -> Recipe:
        """The recipe with every NVFP4 block scaled to the peak that errs less; else itself."""
        k, v = (NVFP4_FOUR_OVER_SIX if side is NVFP4 else side for side in (self.k, self.v))
        return replace(self, k=k, v=v)


# Q stays as the model gave it: quantizing it costs accuracy and saves no byte of the cache.
RECIPES: dict[str, Recipe] = {name: Recipe(name, fmt, fmt) for name, fmt in FORMATS.items()}
RECIPES["mxfp8-nvfp4"] = Recipe("mxfp8-nvfp4", MXFP8, NVFP4)


def get_recipe(name: str) -> Recipe:
    """The recipe called ``name``.

    Raises:
        UnknownNameError: there is none; the message lists those there are.
    """
    if name not in RECIPES:
        raise UnknownNameError("recipe", name, tuple(RECIPES))
    return RECIPES[name]


_LAYERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?:(\S+)")


def parse_layer_recipes(text: str) -> dict[int, Recipe]:
    """Recipes of single layers: ``LAYERS:RECIPE``, joined by commas, like ``0-1:mxfp8,29:bf16``.

    Layers count from 0; a range includes both its ends.

    Raises:
        LayerRecipesError: the text is no such list, or names a layer twice.
        UnknownNameError: a recipe is not known.
    """
    found: dict[int, Recipe] = {}
    for part in text.split(","):
        match = _LAYERS.fullmatch(part.strip())
        if match is None:
            raise LayerRecipesError(
                text, f"expected LAYERS:RECIPE like 0-1:mxfp8,29:bf16, got {part!r}"
            )
        first, last, name = match.groups()
        layers = range(int(first), int(last or first) + 1)
        if not layers:
            raise LayerRecipesError(text, f"expected a range that rises, got {part!r}")
        if twice := sorted(found.keys() & set(layers)):
            raise LayerRecipesError(text, f"expected every layer once, got {twice[0]} twice")
        found |= dict.fromkeys(layers, get_recipe(name))
    return found


class FP4KVCacheRecipe(Enum):
    """The FP4 recipes by the names that code around such caches uses.

    MXFP4: block scales only: KVFP4, of 16 elements, and not the recipe ``mxfp4``, of 32.
    NVFP4: E4M3 block scales over 16 elements and a float32 global scale.
    """

    MXFP4 = 1
    NVFP4 = 2

    @property
    def recipe(self) -> Recipe:
        """The recipe of the cache."""
        return RECIPES["kvfp4" if self is FP4KVCacheRecipe.MXFP4 else "nvfp4"]

    @classmethod
    def from_flag(cls, flag: str) -> FP4KVCacheRecipe:
        """The member that ``--fp4-kv-cache-recipe`` means.

        Raises:
            UnknownNameError: the flag's value names no FP4 recipe.
        """
        by_name = {member.recipe.name: member for member in reversed(cls)}
        if flag not in by_name:
            raise UnknownNameError("FP4 KV cache recipe", flag, tuple(by_name))
        return by_name[flag]
