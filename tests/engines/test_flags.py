"""Options of the SGLang backend: names, mapping onto the engine's own, transport."""

from __future__ import annotations

import argparse
import pickle
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from inkling_backend.engines.sglang import flags as module
from inkling_backend.engines.sglang.flags import Flags, construct, flags_of, take
from inkling_backend.errors import LayerRecipesError, UnknownNameError
from inkling_backend.formats import RECIPES, FP4KVCacheRecipe


class Record:
    """What the engine's ``ServerArgs`` is to these functions."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.seen_while_constructing = flags_of(self)


def test_every_name_means_a_recipe() -> None:
    assert set(module.KV_CACHE_DTYPES.values()) == set(RECIPES)
    for flag, dtype in module.FP4_RECIPES.items():
        assert module.KV_CACHE_DTYPES[dtype] == flag
    for member in FP4KVCacheRecipe:
        assert member.recipe.name in module.FP4_RECIPES
    assert set(module.FP4_RECIPES) == {name for name in RECIPES if "fp4" in name}
    assert module.OWN_KV_CACHE_DTYPES == ("mxfp4", "mxfp8-nvfp4")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, None),
        ({"fp4_kv_cache_recipe": None}, None),
        ({"kv_cache_dtype": "auto"}, "auto"),
        ({"fp4_kv_cache_recipe": "nvfp4"}, "nvfp4"),
        ({"fp4_kv_cache_recipe": "mxfp8-nvfp4"}, "mxfp8-nvfp4"),
        ({"fp4_kv_cache_recipe": "mxfp4"}, "mxfp4"),
        ({"fp4_kv_cache_recipe": "kvfp4", "kv_cache_dtype": "auto"}, "fp4_mx_block16"),
        ({"fp4_kv_cache_recipe": "kvfp4", "kv_cache_dtype": "mxfp8"}, "mxfp8"),
    ],
)
def test_recipe_becomes_the_engines_dtype(given: dict[str, Any], dtype: str | None) -> None:
    arguments = dict(given)
    flags = take(arguments)
    assert arguments.get("kv_cache_dtype") == dtype
    assert not {field.name for field in fields(Flags)} & arguments.keys()
    assert flags.fp4_kv_cache_recipe == given.get("fp4_kv_cache_recipe")


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("fp4_kv_cache_recipe", ("nvfp4", "kvfp4", "mxfp4", "mxfp8-nvfp4")),
        ("inkling_query_dtype", ("auto", "mxfp8", "bf16")),
        ("inkling_key_transform", ("none", "rotate", "center", "center+rotate")),
        ("inkling_nvfp4_scale", ("max", "fouroversix")),
        ("inkling_sink_tokens", ("0", "1", "8")),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(field: str, names: tuple[str, ...]) -> None:
    with pytest.raises(UnknownNameError, match="mx9") as error:
        take({field: "mx9"})
    assert all(name in str(error.value) for name in names)


def test_command_line() -> None:
    parser = argparse.ArgumentParser()
    module.add_cli_args(parser)
    assert take(vars(parser.parse_args([]))) == Flags()
    args = ["--fp4-kv-cache-recipe", "kvfp4", "--inkling-query-dtype", "bf16"]
    args += ["--inkling-key-transform", "center+rotate", "--inkling-nvfp4-scale", "fouroversix"]
    args += ["--inkling-layer-recipes", "0-1:mxfp8", "--inkling-sink-tokens", "4"]
    given = Flags("kvfp4", "bf16", "center+rotate", "fouroversix", "0-1:mxfp8", 4)
    assert take(vars(parser.parse_args(args))) == given
    with pytest.raises(SystemExit):
        parser.parse_args(["--fp4-kv-cache-recipe", "mx9"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--inkling-sink-tokens", "9"])


def test_the_engines_own_option_takes_the_mixed_recipe() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-cache-dtype", choices=["auto", "mxfp8"], default="auto")
    module.add_cli_args(parser)
    args = parser.parse_args(["--kv-cache-dtype", "mxfp8-nvfp4"])
    assert args.kv_cache_dtype == "mxfp8-nvfp4"
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-cache-dtype", "nvfp4-mxfp8"])


def test_query_dtype() -> None:
    assert Flags(inkling_query_dtype="mxfp8").quantizes_query
    assert not Flags().quantizes_query
    assert not Flags(inkling_query_dtype="bf16").quantizes_query


def test_key_transform() -> None:
    found = {
        name: (flags.centers_keys, flags.rotates_keys)
        for name in module.KEY_TRANSFORMS
        for flags in [Flags(inkling_key_transform=name)]
    }
    assert found == {
        "none": (False, False),
        "rotate": (False, True),
        "center": (True, False),
        "center+rotate": (True, True),
    }


def test_recipes_of_single_layers() -> None:
    assert Flags().layer_recipes() == {}
    flags = Flags(inkling_layer_recipes="0:mxfp8,2:nvfp4", inkling_nvfp4_scale="fouroversix")
    found = flags.layer_recipes()
    assert list(found) == [0, 2]
    assert found[0] == RECIPES["mxfp8"]
    assert found[2].k.four_over_six
    with pytest.raises(LayerRecipesError, match="LAYERS:RECIPE"):
        take({"inkling_layer_recipes": "first:mxfp8"})


def test_flags_travel_on_the_record() -> None:
    flags = Flags("nvfp4", "bf16")
    record = construct(flags, lambda: Record(kv_cache_dtype="nvfp4"))
    assert record.seen_while_constructing == flags
    assert flags_of(record) == flags
    assert flags_of(pickle.loads(pickle.dumps(record))) == flags
    assert flags_of(SimpleNamespace()) == Flags(), "flags of one record must not leak into another"


def test_flags_do_not_leak_from_a_failed_construction() -> None:
    def fail() -> None:
        raise ValueError("the engine refuses")

    with pytest.raises(ValueError, match="the engine refuses"):
        construct(Flags("nvfp4"), fail)
    assert flags_of(SimpleNamespace()) == Flags()
