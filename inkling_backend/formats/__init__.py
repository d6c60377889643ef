"""Number formats of the cache: descriptors, exact conversions in plain torch, page geometry."""

from inkling_backend.formats.query import Query
from inkling_backend.formats.recipe import (
    FORMATS,
    RECIPES,
    FP4KVCacheRecipe,
    Recipe,
    get_format,
    get_recipe,
    parse_layer_recipes,
)
from inkling_backend.formats.spec import Format, Quantized, ScaleOrder

__all__ = [
    "FORMATS",
    "RECIPES",
    "FP4KVCacheRecipe",
    "Format",
    "Quantized",
    "Query",
    "Recipe",
    "ScaleOrder",
    "get_format",
    "get_recipe",
    "parse_layer_recipes",
]
