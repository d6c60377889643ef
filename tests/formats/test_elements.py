"""Every code and every rounding boundary of the element and scale codes."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import scalar_formats as scalar
import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import elements

BYTES = torch.arange(256, dtype=torch.uint8)


def fractions(x: torch.Tensor) -> list[Fraction | None]:
    return [None if v != v else Fraction(v) for v in x.double().tolist()]


def test_decode_e4m3_every_code() -> None:
    values = elements.decode_e4m3(BYTES)
    assert fractions(values) == [scalar.e4m3_value(c) for c in range(256)]
    assert torch.equal(values[128:254].signbit(), torch.ones(126, dtype=torch.bool))


def test_decode_e8m0_every_byte() -> None:
    assert fractions(elements.decode_e8m0(BYTES)) == [scalar.e8m0_value(c) for c in range(256)]


def test_decode_e2m1_every_pair() -> None:
    values = fractions(elements.decode_e2m1_packed(BYTES[:, None]).flatten())
    expected = [scalar.e2m1_value(c) for byte in range(256) for c in (byte & 15, byte >> 4)]
    assert values == expected


def test_pack_inverts_unpack() -> None:
    codes = torch.stack((BYTES & 15, BYTES >> 4), -1)
    assert torch.equal(elements.pack_nibbles(codes).flatten(), BYTES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_e4m3_every_16_bit_float(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    codes = elements.encode_e4m3(x)
    nan = x.isnan()
    assert (codes[nan] & 0x7F == 0x7F).all()
    assert torch.equal(codes[x == torch.inf], codes.new_full(((x == torch.inf).sum(),), 0x7E))
    x, codes = x[x.isfinite()], codes[x.isfinite()]
    # Every 16-bit float against a search of all codes, in float64, where all of it is exact.
    values = torch.tensor([float(v) for v in scalar.E4M3_POSITIVE], dtype=torch.float64)
    magnitude = x.abs().double()
    high = torch.searchsorted(values, magnitude).clamp(1, 126)
    below, above = magnitude - values[high - 1], values[high] - magnitude
    up = (above < below) | ((above == below) & (high % 2 == 0))
    expected = torch.where(up, high, high - 1) | (x.signbit().long() << 7)
    assert torch.equal(codes.long(), expected)
    # And against torch's own conversion, where it does not overflow to NaN.
    inside = x.abs() <= 464
    assert inside.sum() > 10_000
    own = x[inside].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes[inside], own)


def test_encode_e4m3_inverts_decode() -> None:
    codes = BYTES[(BYTES & 0x7F) != 0x7F]
    assert torch.equal(elements.encode_e4m3(elements.decode_e4m3(codes)), codes)


@pytest.mark.parametrize("values", [scalar.E4M3_POSITIVE, scalar.E2M1_POSITIVE])
@pytest.mark.parametrize("ties_to_even", [True, False])
def test_ties_and_their_neighbours(values: list[Fraction], ties_to_even: bool) -> None:
    middles = torch.tensor([float(a + b) / 2 for a, b in pairwise(values)])
    down, up = (torch.nextafter(middles, torch.tensor(t)) for t in (0.0, torch.inf))
    x = torch.cat([middles, down, up])
    if values is scalar.E2M1_POSITIVE:
        codes = elements.encode_e2m1(x, x < 0, ties_to_even=ties_to_even)
        negative = elements.encode_e2m1(x, x > 0, ties_to_even=ties_to_even)
        assert torch.equal(negative, codes | 8)
    elif ties_to_even:
        codes = elements.encode_e4m3(x)
        assert torch.equal(elements.encode_e4m3(-x), codes | 0x80)
    else:
        return  # E4M3 has one rounding rule
    expected = [scalar.nearest(Fraction(v), values, ties_to_even=ties_to_even) for v in x.tolist()]
    assert codes.tolist() == expected
    n = len(middles)
    assert codes[n : 2 * n].tolist() == list(range(n))
    assert codes[2 * n :].tolist() == list(range(1, n + 1))


@pytest.mark.parametrize("ties_to_even", [True, False])
def test_encode_e2m1_inverts_decode_and_saturates(ties_to_even: bool) -> None:
    x = torch.tensor([*map(float, scalar.E2M1_POSITIVE), 6.01, 448.0, 3e38, torch.inf, torch.nan])
    codes = elements.encode_e2m1(x, x < 0, ties_to_even=ties_to_even)
    assert codes.tolist() == [*range(8), 7, 7, 7, 7, 0]


@pytest.mark.parametrize(("peak", "floor"), [(448, 19), (6, 94)])
def test_encode_e8m0_around_every_power_of_two(peak: int, floor: int) -> None:
    exponents = torch.arange(-148, 128).double()
    x = torch.cat([m * torch.exp2(exponents) for m in (1.0, 1.25, 1.5, 1.75, 1.9)])
    x = x[x <= 3e38].float()
    x = torch.cat([x, torch.nextafter(x, x * 0), torch.nextafter(x, x * 2), torch.zeros(1)])
    x = x[x.isfinite()]
    got = elements.encode_e8m0(x, float(peak), floor)
    lowest = peak * Fraction(2) ** (floor - 127)
    expected = [scalar.power_of_two_byte(Fraction(v), peak, lowest) for v in x.double().tolist()]
    assert got.dtype == torch.uint8
    assert got.tolist() == expected
    assert len(got.unique()) > 100


def test_to_blocks_names_what_does_not_fit() -> None:
    with pytest.raises(InvalidTensorError, match="last dimension a multiple of 16, got"):
        elements.to_blocks(torch.zeros(3, 24), 16)
    with pytest.raises(InvalidTensorError, match="floating point"):
        elements.to_blocks(torch.zeros(3, 32, dtype=torch.int32), 16)
