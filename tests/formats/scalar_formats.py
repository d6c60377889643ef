"""The number formats a second time, one number after another in rational arithmetic.

Written from the rules alone, so that it shares nothing with the package: values are Fractions,
None stands for NaN, and rounding searches the list of all codes.
"""

from __future__ import annotations

import bisect
import struct
from fractions import Fraction


def float32(x: Fraction) -> Fraction:
    """The float32 nearest to x (ties to even); x within range."""
    if x == 0:
        return x
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length(), -140)
    while abs(x) >= Fraction(2) ** exponent:
        exponent += 1  # now |x| < 2**exponent
    while abs(x) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - 24, -149)
    return round(x / quantum) * quantum  # Python rounds Fractions to even


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def e4m3_value(code: int) -> Fraction | None:
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(2) ** -6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e8m0_value(byte: int) -> Fraction | None:
    return None if byte == 255 else Fraction(2) ** (byte - 127)


def e2m1_value(code: int) -> Fraction:
    magnitude = [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6][code & 7]
    return Fraction(-magnitude if code & 8 else magnitude)


E4M3_POSITIVE = [value for c in range(127) if (value := e4m3_value(c)) is not None]
E2M1_POSITIVE = [e2m1_value(c) for c in range(8)]


def nearest(x: Fraction, values: list[Fraction], *, ties_to_even: bool) -> int:
    """Code of the value nearest to x >= 0, saturating; values ascend with their codes."""
    high = bisect.bisect_left(values, x)
    if high == 0:
        return 0
    if high == len(values):
        return high - 1
    below, above = x - values[high - 1], values[high] - x
    if below == above:
        return high - high % 2 if ties_to_even else high
    return high if above < below else high - 1


def power_of_two_byte(amax: Fraction, peak: int, floor: Fraction) -> int:
    """e + 127 for the smallest integer e with max(amax, floor) <= peak * 2**e."""
    e = -140
    while max(amax, floor) > peak * Fraction(2) ** e:
        e += 1
    return e + 127


def quantize_mxfp8(block: list[Fraction]) -> tuple[list[int], int]:
    """32 finite numbers -> magnitude and sign codes, scale byte."""
    floor = Fraction(*float.as_integer_ratio(struct.unpack("<f", struct.pack("<f", 1e-30))[0]))
    byte = power_of_two_byte(max(map(abs, block)), 448, floor)
    scale = Fraction(2) ** (byte - 127)
    codes = [nearest(abs(x) / scale, E4M3_POSITIVE, ties_to_even=True) for x in block]
    return [c | (0x80 if x < 0 else 0) for c, x in zip(codes, block, strict=True)], byte


def quantize_kvfp4(block: list[Fraction]) -> tuple[list[int], int]:
    """16 finite numbers -> codes, scale byte."""
    byte = power_of_two_byte(max(map(abs, block)), 6, 6 * Fraction(1, 10**10))
    scale = Fraction(2) ** (byte - 127)
    codes = [nearest(abs(x) / scale, E2M1_POSITIVE, ties_to_even=False) for x in block]
    return [c | (8 if x < 0 else 0) for c, x in zip(codes, block, strict=True)], byte


def quantize_mxfp4(block: list[Fraction]) -> tuple[list[int], int]:
    """32 finite numbers -> codes, scale byte: the largest power of two in amax, over 4."""
    e = 127
    while Fraction(2) ** e > max(map(abs, block)) and e > -125:
        e -= 1
    scale = Fraction(2) ** (e - 2)
    codes = [nearest(abs(x) / scale, E2M1_POSITIVE, ties_to_even=True) for x in block]
    return [c | (8 if x < 0 else 0) for c, x in zip(codes, block, strict=True)], e - 2 + 127


def quantize_nvfp4(block: list[Fraction], g: Fraction) -> tuple[list[int], int]:
    """16 finite numbers and the global scale -> codes, scale byte; each step rounds to float32."""
    ratio = float32(max(map(abs, block)) / float32(6 * g))
    byte = nearest(ratio, E4M3_POSITIVE, ties_to_even=True)
    if byte == 0:
        return [0] * len(block), 0
    step = float32(E4M3_POSITIVE[byte] * g)
    codes = [nearest(float32(abs(x) / step), E2M1_POSITIVE, ties_to_even=True) for x in block]
    return [c | (8 if x < 0 else 0) for c, x in zip(codes, block, strict=True)], byte
