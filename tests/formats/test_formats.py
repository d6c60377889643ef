"""The formats' rules: against rational arithmetic, and as properties over hostile inputs."""

from __future__ import annotations

from fractions import Fraction

import pytest
import scalar_formats as scalar
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_backend.errors import InvalidTensorError, LayerRecipesError, UnknownNameError
from inkling_backend.formats import (
    FORMATS,
    RECIPES,
    FP4KVCacheRecipe,
    Quantized,
    Query,
    get_format,
    get_recipe,
    parse_layer_recipes,
)
from inkling_backend.formats.nvfp4 import NVFP4_FOUR_OVER_SIX

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.block]
G = torch.tensor([0.0123])


def quantize(name: str, x: torch.Tensor, g: torch.Tensor = G) -> Quantized:
    return get_format(name).quantize(x, g)


def dequantize(name: str, q: Quantized, g: torch.Tensor = G) -> torch.Tensor:
    return get_format(name).dequantize(q, g)


def edge_rows(block: int) -> torch.Tensor:
    """Rows whose blocks cover exponents, maxima around the scale's steps, ties and tiny numbers."""
    gen = torch.Generator().manual_seed(5)
    rows = [torch.zeros(block), torch.full((block,), 1e-45), -torch.full((block,), 1e-30)]
    for exponent in (*range(-141, 121, 9), 127):
        for peak in (1.0, 1.5, 1.5000001, 1.75, 1.7500001, 1.9999999):
            values = torch.rand(block, generator=gen, dtype=torch.float64) * 2 - 1
            values[int(torch.randint(block, (1,), generator=gen))] = 1.0
            rows.append((values * peak * 2.0**exponent).float())
    for scale in (1.0, 2.0**-20, 2.0**30):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) * scale
        rows.append(torch.cat([ties, -ties]).repeat(block // 16))
    return torch.stack(rows)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("g", [1.0, 0.0123, 3.0e5])
def test_quantize_equals_rational_arithmetic(name: str, g: float) -> None:
    if name != "nvfp4" and g != 1.0:
        return  # these formats have no global scale
    fmt = get_format(name)
    x = edge_rows(fmt.block)
    data, scale = quantize(name, x, torch.tensor([g]))
    if name != "mxfp8":
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    for row, codes, byte in zip(x.double().tolist(), data.tolist(), scale.tolist(), strict=True):
        numbers = [Fraction(v) for v in row]
        more = [Fraction(float(torch.tensor(g)))] if fmt.has_global_scale else []
        expected = getattr(scalar, f"quantize_{name}")(numbers, *more)
        # The sign of a zero is not in a Fraction; rows hold no -0.0.
        assert (codes, byte) == (expected[0], [expected[1]])


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantize_every_scale_and_code(name: str) -> None:
    fmt = get_format(name)
    codes = torch.arange(256, dtype=torch.uint8)
    packed = 1 if name == "mxfp8" else 2
    data = codes.expand(256, 256)
    scale = codes[:, None].expand(256, 256 * packed // fmt.block)
    values = fmt.dequantize(Quantized(data, scale), torch.ones(1)).double()
    decode_scale = scalar.e4m3_value if name == "nvfp4" else scalar.e8m0_value
    if name == "mxfp8":
        elements = [scalar.e4m3_value(c) for c in range(256)]
    else:
        elements = [scalar.e2m1_value(c) for b in range(256) for c in (b & 15, b >> 4)]
    s = to_double([decode_scale(byte) for byte in range(256)])
    # Exact in float64; float32 may overflow to infinity, as it should.
    expected = (s[:, None] * to_double(elements)).float().double()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().sum() >= 256


def to_double(values: list[Fraction | None]) -> torch.Tensor:
    numbers = [torch.nan if v is None else float(v) for v in values]
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("name", QUANTIZED)
def test_encode_inverts_decode_for_every_code(name: str) -> None:
    """A block that holds its largest code keeps its codes and scale, at every usable scale."""
    fmt = get_format(name)
    g = torch.ones(1)
    if name == "mxfp8":
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 0x7F) != 0x7F]
        codes = torch.cat([codes, codes[:25]]).view(-1, fmt.block - 1)
        data = torch.cat([torch.full((len(codes), 1), 0x7E, dtype=torch.uint8), codes], 1)
        bytes_ = torch.arange(19, 247, dtype=torch.uint8)
    else:
        nibbles = torch.arange(16, dtype=torch.uint8)
        nibbles[8] = 7  # a negative zero does not come back: the sign is x < 0
        data = (nibbles[0::2] | (nibbles[1::2] << 4)).repeat(fmt.block // 16)[None]
        first, last = {"nvfp4": (1, 126), "kvfp4": (94, 251), "mxfp4": (0, 252)}[name]
        bytes_ = torch.arange(first, last + 1, dtype=torch.uint8)
    data = data.repeat(len(bytes_), 1, 1).flatten(0, 1)
    scale = bytes_.repeat_interleave(len(data) // len(bytes_))[:, None]
    again = fmt.quantize(fmt.dequantize(Quantized(data, scale), g), g)
    assert torch.equal(again.scale, scale)
    assert torch.equal(again.data, data)


@pytest.mark.parametrize(
    ("name", "byte"), [("mxfp8", 19), ("kvfp4", 94), ("nvfp4", 0), ("mxfp4", 0)]
)
def test_zero_rows(name: str, byte: int) -> None:
    q = quantize(name, torch.zeros(2, 3, 64))
    assert q.scale.unique().tolist() == [byte]
    assert q.data.unique().tolist() == [0]
    assert torch.equal(dequantize(name, q), torch.zeros(2, 3, 64))


@pytest.mark.parametrize("name", [*QUANTIZED, "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_dtypes_and_strides(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    base = torch.randn(96, 5, 2, generator=torch.Generator().manual_seed(6)).to(dtype)
    x = base.permute(2, 1, 0)
    q = fmt.quantize(x, G)
    assert q.data.shape == (2, 5, fmt.data_bytes(96) // fmt.data_dtype.itemsize)
    assert q.data.dtype == fmt.data_dtype
    if fmt.block:
        assert q.scale.shape == (2, 5, fmt.scale_bytes(96))
        assert q.scale.dtype == torch.uint8
    else:
        assert q.scale is None
    dense = fmt.quantize(x.contiguous().requires_grad_(), G)
    assert torch.equal(dense.data, q.data)
    assert dense.data.requires_grad is False
    assert fmt.dequantize(q, G).dtype == torch.float32
    empty = fmt.quantize(x[:0], G)
    assert fmt.dequantize(empty, G).shape == (0, 5, 96)
    if fmt.block:
        with pytest.raises(InvalidTensorError):
            fmt.quantize(x[..., :40], G)


def test_bf16_rounds_to_nearest_even() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32)
    q = get_format("bf16").quantize(bits.view(torch.float32), None)
    assert q.data.view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


# Up to 2**127: a larger number may round up to 2**128, which reads back as infinity.
finite = st.floats(-(2.0**127), 2.0**127, width=32)
moderate = st.floats(-1024, 1024, width=32)
anything = st.one_of(
    finite,
    st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 448.0, 449.0, 1e4, torch.inf, -torch.inf, torch.nan]),
)


def rows(element: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(element, min_size=64, max_size=64).map(lambda v: torch.tensor(v))


@pytest.mark.parametrize("name", QUANTIZED)
@given(x=rows(anything))
@settings(max_examples=60, deadline=None)
def test_non_finite_is_nan_and_nothing_else_changes(name: str, x: torch.Tensor) -> None:
    block = get_format(name).block
    bad = ~x.isfinite()
    q = quantize(name, x)
    clean = quantize(name, torch.where(bad, 0.0, x))
    got, want = dequantize(name, q), dequantize(name, clean)
    lost = bad
    if name != "mxfp8":
        lost = bad.view(-1, block).any(-1, keepdim=True).expand(-1, block).flatten()
        hit = bad.view(-1, block).any(-1)
        assert (q.scale[hit] == (0x7F if name == "nvfp4" else 0xFF)).all()
        assert (q.data.view(-1, block // 2)[hit] == 0).all()
    else:
        assert torch.equal(q.scale, clean.scale)
        assert torch.equal(q.data[bad] == 0xFF, x[bad].signbit())
    assert torch.equal(got.isnan(), lost)
    assert torch.equal(got[~lost], want[~lost])
    assert not want.isnan().any()


@pytest.mark.parametrize("name", QUANTIZED)
@given(x=rows(finite))
@settings(max_examples=60, deadline=None)
def test_error_bound(name: str, x: torch.Tensor) -> None:
    fmt = get_format(name)
    q = quantize(name, x)
    got = dequantize(name, q).double().view(-1, fmt.block)
    blocks = x.double().view(-1, fmt.block)
    amax = blocks.abs().amax(-1, keepdim=True)
    error = (got - blocks).abs()
    if name == "mxfp8":
        # Half a unit of 3 mantissa bits, and half of the smallest step, 2**-9, of the scale.
        scale = torch.exp2(q.scale.double() - 127)[:, None]
        assert (error <= torch.maximum(blocks.abs() / 16, scale * 2.0**-10)).all()
        assert (amax <= 448 * scale).all()
    elif name == "mxfp4":
        # The same, but for what saturates: from 6 to 8 over the scale.
        scale = torch.exp2(q.scale.double() - 127)[:, None]
        most = torch.maximum(torch.maximum(blocks.abs() / 4, scale / 4), blocks.abs() - 6 * scale)
        assert (error <= most).all()
        assert (amax < 8 * scale).all()
    elif name == "kvfp4":
        # Codes within 2 are 1/2 apart, above that half a unit of one mantissa bit.
        scale = torch.exp2(q.scale.double() - 127)[:, None]
        assert (error <= torch.maximum(blocks.abs() / 4, scale / 4)).all()
        assert (amax <= 6 * scale).all()
    else:
        # The scale is rounded, to 448 at most: then the largest codes saturate.
        scale = q.scale.view(torch.float8_e4m3fn).double()[:, None]
        step = scale * G.double()
        inside = blocks.abs() <= 6 * step
        bound = torch.maximum(blocks.abs() / 4, step / 4) * (1 + 1e-6)
        assert (error <= bound)[inside].all()
        assert (got.abs() >= 6 * step * (1 - 1e-6))[~inside & (step > 0).expand_as(inside)].all()
    assert (got * blocks >= 0).all()


@pytest.mark.parametrize("name", QUANTIZED)
@given(x=rows(anything))
@settings(max_examples=60, deadline=None)
def test_quantizing_again_changes_no_value(name: str, x: torch.Tensor) -> None:
    once = dequantize(name, quantize(name, x))
    if name == "nvfp4":
        # Under a subnormal scale the block's maximum may move, and the scale follows it once.
        once = dequantize(name, quantize(name, once))
    again = dequantize(name, quantize(name, once))
    torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)


@given(x=rows(moderate), shift=st.integers(-20, 20))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", ["mxfp8", "kvfp4", "mxfp4"])
def test_powers_of_two_only_move_the_scale(name: str, x: torch.Tensor, shift: int) -> None:
    x = torch.where(x.abs() < 1e-2, 1.0, x)
    a, b = quantize(name, x), quantize(name, x * 2.0**shift)
    assert torch.equal(a.data, b.data)
    assert torch.equal(b.scale.int() - a.scale.int(), torch.full_like(a.scale, 1).int() * shift)


def test_mxfp4_bytes_by_hand() -> None:
    """OCP MX v1.0: a scale of 2^(floor(log2(amax)) - 2), elements to nearest even, saturating."""
    x = torch.zeros(5, 32)
    # 2^(2 - 2): 7.9 saturates; 2.5 and 0.25 are ties, to 2 and to 0; 0.26 is nearer to 0.5.
    x[0, :6] = torch.tensor([7.9, 5.1, 2.5, -0.25, 0.26, -5.0])
    x[1, 30:] = torch.tensor([16.0, 3.0])  # 2^(4 - 2): 4, and 0.75, a tie to 1
    x[2, 1] = 1e-45  # the least scale, 2^-127
    x[3, 5], x[4, 31] = torch.nan, -torch.inf
    data, scale = get_format("mxfp4").quantize(x, None)
    assert scale is not None
    assert scale.flatten().tolist() == [127, 129, 0, 255, 255]
    # Codes 7 7 4 8 1 14, two a byte, the first in the low nibble.
    assert data[0, :4].tolist() == [0x77, 0x84, 0xE1, 0]
    assert data[1, 14:].tolist() == [0, 0x26]
    assert not data[2:].any()
    seen = get_format("mxfp4").dequantize(Quantized(data, scale), None)
    assert seen[0, :6].tolist() == [6.0, 6.0, 2.0, 0.0, 0.5, -4.0]
    assert seen[1, 30:].tolist() == [16.0, 4.0]
    assert seen[3:].isnan().all()


def nvfp4_errors(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors of blocks by the plain rule and by four-over-six."""
    fmt = get_format("nvfp4")
    return tuple(  # type: ignore[return-value]
        (fmt.dequantize(rule(x, g), g) - x).unflatten(-1, (-1, 16)).square().sum(-1)
        for rule in (fmt.quantize, NVFP4_FOUR_OVER_SIX.quantize)
    )


@given(x=rows(moderate))
@settings(max_examples=30, deadline=None)
def test_four_over_six_never_errs_more(x: torch.Tensor) -> None:
    plain, adaptive = nvfp4_errors(x, G)
    assert (adaptive <= plain).all()


def test_four_over_six_takes_four_where_that_is_exact() -> None:
    x = torch.tensor([8.0, 6.0, *[0.0] * 14, 6.0, 4.0, *[0.0] * 14])
    one = torch.ones(1)
    data, scale = NVFP4_FOUR_OVER_SIX.quantize(x, one)
    assert scale is not None
    assert scale.view(torch.float8_e4m3fn).tolist() == [2.0, 1.0]
    assert (data[0].item(), data[8].item()) == (0x56, 0x67)
    plain, adaptive = nvfp4_errors(x, one)
    assert (plain > 0).tolist() == [True, False]
    assert not adaptive.any()


def test_four_over_six_keeps_the_rules_for_special_blocks() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    ours, plain = NVFP4_FOUR_OVER_SIX.quantize(x, G), quantize("nvfp4", x)
    assert torch.equal(ours.data, plain.data)
    assert torch.equal(ours.scale, plain.scale)
    assert "nvfp4" in FORMATS
    assert FORMATS["nvfp4"] is not NVFP4_FOUR_OVER_SIX


def test_names() -> None:
    assert list(FORMATS) == ["mxfp8", "nvfp4", "kvfp4", "mxfp4", "bf16"]
    assert list(RECIPES) == [*FORMATS, "mxfp8-nvfp4"]
    mixed = get_recipe("mxfp8-nvfp4")
    assert (mixed.k.name, mixed.v.name, mixed.quantize_query) == ("mxfp8", "nvfp4", False)
    for name in FORMATS:
        recipe = get_recipe(name)
        assert (recipe.name, recipe.k.name, recipe.v.name) == (name, name, name)
        assert not recipe.quantize_query
        quantized = recipe.with_mxfp8_query()
        assert quantized.quantize_query is (name in ("mxfp8", "mxfp8-nvfp4"))
        assert (quantized.k, quantized.v) == (recipe.k, recipe.v)
    with pytest.raises(UnknownNameError, match="unknown format 'fp8'; known: mxfp8, nvfp4, kvfp4"):
        get_format("fp8")
    with pytest.raises(UnknownNameError, match="unknown recipe 'fp8'; known: mxfp8"):
        get_recipe("fp8")
    assert FP4KVCacheRecipe.from_flag("nvfp4") is FP4KVCacheRecipe.NVFP4
    assert FP4KVCacheRecipe.from_flag("kvfp4") is FP4KVCacheRecipe.MXFP4
    assert FP4KVCacheRecipe.MXFP4.recipe is get_recipe("kvfp4")
    with pytest.raises(UnknownNameError, match="'mxfp4'; known: nvfp4, kvfp4"):
        FP4KVCacheRecipe.from_flag("mxfp4")


@pytest.mark.parametrize(
    ("name", "bits", "row"),
    [("mxfp8", 8.25, 132), ("nvfp4", 4.5, 72), ("kvfp4", 4.5, 72), ("mxfp4", 4.25, 68)],
)
def test_sizes(name: str, bits: float, row: int) -> None:
    fmt = get_format(name)
    assert (fmt.bits_per_element, fmt.row_bytes(128)) == (bits, row)
    assert fmt.reasons_against(96, "head_dim") == []
    assert "head_dim 40 does not fit" in fmt.reasons_against(40, "head_dim")[0]


def test_query_dequantizes_what_it_holds() -> None:
    q = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    assert torch.equal(Query(q).dequantize(), q.float())
    coded = Query.quantize(q)
    assert coded.scale.shape == (3, 2, 2)
    fmt = get_format("mxfp8")
    assert torch.equal(coded.dequantize(), fmt.dequantize(fmt.quantize(q, None), None))


def test_recipes_of_single_layers() -> None:
    found = parse_layer_recipes("0-2:mxfp8, 29:bf16,7-7:mxfp8-nvfp4")
    names = {layer: recipe.name for layer, recipe in found.items()}
    assert names == {0: "mxfp8", 1: "mxfp8", 2: "mxfp8", 29: "bf16", 7: "mxfp8-nvfp4"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected LAYERS:RECIPE"),
        ("0", "expected LAYERS:RECIPE"),
        ("0:mxfp8,", "expected LAYERS:RECIPE"),
        ("-1:mxfp8", "expected LAYERS:RECIPE"),
        ("0-99999:mxfp8", "expected LAYERS:RECIPE"),
        ("3-1:mxfp8", "a range that rises"),
        ("0-4:mxfp8,4:bf16", "got 4 twice"),
    ],
)
def test_unreadable_recipes_of_single_layers(text: str, what: str) -> None:
    with pytest.raises(LayerRecipesError, match=what):
        parse_layer_recipes(text)


def test_unknown_recipes_of_single_layers() -> None:
    with pytest.raises(UnknownNameError, match=r"mxfp9.*known: mxfp8"):
        parse_layer_recipes("0:mxfp9")
