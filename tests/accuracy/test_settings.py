"""Names of settings, and the formats of other software."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.accuracy.settings import (
    BASES,
    DEFAULT_SETTINGS,
    FP8_PER_TENSOR,
    QUICK_SETTINGS,
    parse,
)
from inkling_backend.errors import LayerRecipesError, UnknownNameError
from inkling_backend.formats import RECIPES
from inkling_backend.formats.nvfp4 import NVFP4, NVFP4_FOUR_OVER_SIX


def test_every_default_is_known() -> None:
    for name in (*DEFAULT_SETTINGS, *QUICK_SETTINGS):
        assert parse(name).name == name
    assert set(BASES) <= set(DEFAULT_SETTINGS)
    assert len(set(DEFAULT_SETTINGS)) == len(DEFAULT_SETTINGS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_setting(recipe: str) -> None:
    parsed = parse(recipe).recipe
    # The setting of this name has queries in MXFP8.
    assert parsed == (RECIPES[recipe].with_mxfp8_query() if recipe == "mxfp8" else RECIPES[recipe])
    assert parsed.quantize_query is (recipe == "mxfp8")


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16),
        ("fp8_per_tensor", 8),
        ("k_mxfp8_v_nvfp4+sinks1", 6.375 + 16 / 128),
        ("nvfp4+sinks4+layers(0-14:bf16)", (4.5 + 4 * 16 / 128 + 16) / 2),
        ("mxfp4_block32", 4.25),
    ],
)
def test_bits(name: str, bits: float) -> None:
    assert parse(name).bits(30) == bits


def test_transforms() -> None:
    setting = parse("nvfp4+center+rotate+fouroversix+sinks4")
    assert setting.centers
    assert setting.rotates
    assert setting.sink_tokens == 4
    assert setting.recipe.k is setting.recipe.v is NVFP4_FOUR_OVER_SIX
    assert setting.base == "nvfp4"
    plain = parse("nvfp4")
    assert not any((plain.centers, plain.rotates, plain.sink_tokens))
    assert plain.recipe.k is NVFP4
    mixed = parse("mxfp8-nvfp4+fouroversix")
    assert (mixed.name, mixed.recipe.v) == ("k_mxfp8_v_nvfp4+fouroversix", NVFP4_FOUR_OVER_SIX)


def test_layers_with_recipes_of_their_own() -> None:
    setting = parse("nvfp4+rotate+layers(0-1:mxfp8,29:mxfp8-nvfp4)+fouroversix")
    assert setting.name == "nvfp4+rotate+layers(0-1:mxfp8,29:mxfp8-nvfp4)+fouroversix"
    assert setting.rotates
    names = [setting.recipe_of(layer).name for layer in (0, 1, 2, 29)]
    assert names == ["mxfp8", "mxfp8", "nvfp4", "mxfp8-nvfp4"]
    assert setting.recipe_of(29).v is setting.recipe_of(2).k is NVFP4_FOUR_OVER_SIX
    assert setting.bits(30) == (27 * 4.5 + 2 * 8.25 + 6.375) / 30
    with pytest.raises(AccuracyError, match="layer 29 is named, but the model has layers 0 to 28"):
        setting.bits(29)
    assert parse("mxfp8+layers(3:mxfp8-nvfp4)").recipe_of(3).quantize_query
    assert not parse("mxfp8_q_bf16+layers(3:mxfp8)").recipe_of(3).quantize_query
    with pytest.raises(LayerRecipesError, match="LAYERS:RECIPE"):
        parse("nvfp4+layers()")


@pytest.mark.parametrize(
    "name", ["mxfp9", "nvfp4+turn", "nvfp4+layers", "nvfp4+sinks", "nvfp4+sinks9", "nvfp4+", ""]
)
def test_unknown_parts(name: str) -> None:
    with pytest.raises(UnknownNameError, match="known: "):
        parse(name)


@pytest.mark.parametrize("base", ["bf16", "fp8_per_tensor"])
def test_sink_tokens_need_block_scales(base: str) -> None:
    with pytest.raises(AccuracyError, match=r"\+sinks2 goes with a base that has block scales"):
        parse(f"{base}+rotate+sinks2")


def test_four_over_six_needs_nvfp4() -> None:
    with pytest.raises(AccuracyError, match="NVFP4"):
        parse("kvfp4+fouroversix")


def test_fp8_rounds_and_saturates() -> None:
    x = torch.tensor([[1.0625, -500.0, 0.3, 448.0]])
    seen = FP8_PER_TENSOR.dequantize(FP8_PER_TENSOR.quantize(x, None), None)
    assert seen.tolist() == [[1.0, -448.0, 0.3125, 448.0]]


def test_mxfp4_is_the_recipe() -> None:
    assert parse("mxfp4_block32").recipe is RECIPES["mxfp4"]
    assert parse("mxfp4").name == "mxfp4_block32"
