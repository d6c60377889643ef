"""Shapes, lengths, recipes and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_backend.bench import cases
from inkling_backend.bench.cases import Case, CaseError, Heads, Shape, make_case
from inkling_backend.errors import UnknownNameError
from inkling_backend.formats import get_recipe

HEADS = Heads()


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("64x8k", Shape(64, 8192, 0)),
        ("1x1000", Shape(1, 1000, 0)),
        ("1kx2K", Shape(1024, 2048, 0)),
        ("8k", Shape(1, 8192, 0)),
        ("1x2k+32k", Shape(1, 2048, 32768)),
    ],
)
def test_shapes(text: str, shape: Shape) -> None:
    assert cases.parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "x8k", "64x", "64*8k", "8m", "-1x8", "0x8", "4x0", "1x2+"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(CaseError, match="shape"):
        cases.parse_shape(text)


def test_defaults_are_shapes() -> None:
    for defaults in (cases.SHAPES, cases.QUICK_SHAPES):
        for op, texts in defaults.items():
            for text in texts:
                made = make_case(op, text, HEADS, query_tokens=4 if op == cases.VERIFY else 1)
                assert made.context >= made.new_tokens >= 1
    assert len(cases.SHAPES[cases.DECODE]) == 9


def test_only_extend_has_a_prefix() -> None:
    made = make_case(cases.EXTEND, "1x2k+32k", HEADS)
    assert (made.context, made.new_tokens) == (34 * 1024, 2048)
    with pytest.raises(CaseError, match="prefix"):
        make_case(cases.DECODE, "1x2k+32k", HEADS)


def test_verify_needs_room_for_its_query() -> None:
    assert make_case(cases.VERIFY, "2x4", HEADS, query_tokens=4).new_tokens == 4
    with pytest.raises(CaseError, match="at least 4 tokens"):
        make_case(cases.VERIFY, "2x3", HEADS, query_tokens=4)


@given(batch=st.integers(1, 300), mean=st.integers(8, 40000))
def test_ragged_lengths_keep_the_total(batch: int, mean: int) -> None:
    lengths = cases.ragged_lengths(batch, mean, 8)
    assert len(lengths) == batch
    assert sum(lengths) == batch * mean
    assert min(lengths) >= 8 or mean < 400


def test_ragged_lengths_are_spread() -> None:
    lengths = cases.ragged_lengths(64, 8192, 1)
    assert 95 < max(lengths) / min(lengths) < 105
    case = Case(cases.DECODE, 64, 8192, 1, HEADS, ragged=True)
    assert case.lengths == lengths
    assert case.facts()["ragged"] is True


def test_a_recipe_of_two_formats() -> None:
    mixed = get_recipe("mxfp8-nvfp4")
    assert (mixed.k.name, mixed.v.name, mixed.quantize_query) == ("mxfp8", "nvfp4", False)
    assert HEADS.layout(mixed).bytes_per_token == 8 * (132 + 72)
    assert get_recipe("nvfp4").quantize_query is False
    for name in ("mxfp9", "mxfp8-mxfp9", "mxfp9-mxfp8"):
        with pytest.raises(UnknownNameError):
            get_recipe(name)


def test_bytes_of_decode_are_the_cache_the_query_and_the_output() -> None:
    case = make_case(cases.DECODE, "64x8k", HEADS)
    rows = 64 * 32 * 128
    assert case.bytes(get_recipe("bf16")) == 64 * 8192 * 4096 + 4 * rows
    assert case.bytes(get_recipe("mxfp8")) == 64 * 8192 * 2112 + 4 * rows
    quantized = get_recipe("mxfp8").with_mxfp8_query()
    assert case.bytes(quantized) == 64 * 8192 * 2112 + rows * 33 // 32 + 2 * rows
    stored = make_case(cases.DECODE, "64x8k", HEADS, store=True)
    assert stored.bytes(get_recipe("bf16")) - case.bytes(get_recipe("bf16")) == 64 * (4096 + 8)


def test_keys_under_a_transform() -> None:
    recipe, transforms = cases.parse_recipe("mxfp8-nvfp4+center+rotate")
    assert (recipe.name, recipe.k.name) == ("mxfp8-nvfp4+center+rotate", "mxfp8")
    assert transforms == {"center", "rotate"}
    with pytest.raises(UnknownNameError, match="known: center, rotate"):
        cases.parse_recipe("mxfp8+turn")
    case, plain = make_case(cases.STORE, "8k", HEADS), get_recipe("nvfp4")
    rotated = cases.parse_recipe("nvfp4+rotate")[0]
    assert case.bytes(rotated) - case.bytes(plain) == 8192 * 32 * 128 * 4, "Q is read and written"


def test_blocks_scaled_to_four_or_six() -> None:
    recipe, transforms = cases.parse_recipe("mxfp8-nvfp4+fouroversix")
    assert (recipe.k.four_over_six, recipe.v.four_over_six) == (False, True)
    assert transforms == {"fouroversix"}
    with pytest.raises(cases.CaseError, match="rule of NVFP4"):
        cases.parse_recipe("kvfp4+fouroversix")
    case = make_case(cases.STORE, "8k", HEADS)
    assert case.bytes(recipe) == case.bytes(get_recipe("mxfp8-nvfp4"))


def test_sink_tokens() -> None:
    recipe, transforms = cases.parse_recipe("nvfp4+rotate+sinks2")
    assert transforms == {"rotate", "sinks2"}
    assert (HEADS.layout(recipe).sink_tokens, HEADS.layout(get_recipe("nvfp4")).sink_tokens) == (
        2,
        0,
    )
    with pytest.raises(cases.CaseError, match="goes with a base that has block scales"):
        cases.parse_recipe("bf16+sinks2")
    with pytest.raises(UnknownNameError, match="known: center, rotate, fouroversix, sinksN"):
        cases.parse_recipe("nvfp4+sinks9")


def test_bytes_of_store() -> None:
    case = make_case(cases.STORE, "8k", HEADS)
    assert case.bytes(get_recipe("bf16")) == 8192 * (4096 + 8 + 4096)
    query = 32 * 128 * 2 + 32 * 132
    assert case.bytes(get_recipe("mxfp8")) == 8192 * (4096 + 8 + 2112)
    assert case.bytes(get_recipe("mxfp8").with_mxfp8_query()) == 8192 * (4096 + 8 + 2112 + query)


def test_names_say_what_differs() -> None:
    made = [
        make_case(cases.DECODE, "64x8k", HEADS),
        make_case(cases.DECODE, "64x8k", HEADS, ragged=True),
        make_case(cases.DECODE, "64x8k", HEADS, store=True),
        make_case(cases.VERIFY, "64x8k", HEADS, query_tokens=4),
    ]
    assert len({case.name for case in made}) == len(made)
    assert made[0].name == "decode 64x8k"
