"""Casts to E4M3 and E5M2 against tables that these tests make from the formats' definitions."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from megalite.precision.formats import E4M3, E5M2, FloatFormat, cast, nearest

INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def decode(code: int, exponent_bits: int, mantissa_bits: int, specials: str) -> float:
    """The number of a code: sign, exponent, mantissa; subnormals where the exponent is 0. `specials`: `ieee` has
    infinities and NaNs in the highest exponent, `fn` has one NaN, all ones, and `none` has numbers alone."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = (code >> mantissa_bits) % 2**exponent_bits, code % 2**mantissa_bits
    highest, bias = 2**exponent_bits - 1, 2 ** (exponent_bits - 1) - 1
    if specials == "ieee" and exponent == highest:
        return NAN if mantissa else sign * INF
    if specials == "fn" and exponent == highest and mantissa == 2**mantissa_bits - 1:
        return NAN
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


TABLES = {
    E4M3: [decode(code, 4, 3, "fn") for code in range(256)],
    E5M2: [decode(code, 5, 2, "ieee") for code in range(256)],
}
FORMATS = [pytest.param(target, id=target.name) for target in TABLES]


@cache
def positives(target: FloatFormat) -> list[float]:
    """The format's finite numbers from 0 upwards; a number's place in the list has the parity of its code."""
    return [x for x in TABLES[target][: len(TABLES[target]) // 2] if math.isfinite(x)]


def round_exactly(x: float, target: FloatFormat) -> float:
    """The nearest number by exact arithmetic: to the even code of two, to the largest beyond it."""
    numbers, magnitude = positives(target), abs(x)
    above = min(bisect_left(numbers, magnitude), len(numbers) - 1)
    below = max(above - 1, 0)
    excess = Fraction(min(magnitude, numbers[-1])) * 2 - Fraction(numbers[below]) - Fraction(numbers[above])
    up = excess > 0 or (excess == 0 and above % 2 == 0)
    return math.copysign(numbers[above if up else below], x)


def assert_same(found: Tensor, expected: list[float]) -> None:
    """Equal, with the signs of zeros, and NaNs in the same places."""
    truth = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=0, equal_nan=True)
    numbers = ~truth.isnan()
    assert torch.equal(found.double().signbit()[numbers], truth.signbit()[numbers])


@pytest.mark.parametrize("target", FORMATS)
def test_constants_of_a_format_are_those_of_its_table(target: FloatFormat) -> None:
    numbers = positives(target)
    assert target.largest == numbers[-1]
    assert 2.0**target.least_exponent == numbers[2**target.mantissa_bits]  # the first that isn't subnormal


@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_all_256_codes_of_the_stored_dtype_have_the_numbers_of_the_definition(target: FloatFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(target.dtype)
    assert_same(codes.double(), TABLES[target])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", FORMATS)
def test_a_number_of_the_format_stays_itself(target: FloatFormat, dtype: torch.dtype) -> None:
    numbers = [x for x in TABLES[target] if not math.isinf(x)]
    found = cast(torch.tensor(numbers, dtype=dtype), target)
    assert found.dtype == target.dtype
    assert_same(found, numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", FORMATS)
def test_midpoints_go_to_the_even_code_and_what_is_next_to_them_to_the_nearest(
    target: FloatFormat, dtype: torch.dtype
) -> None:
    numbers = torch.tensor(positives(target), dtype=torch.float64)
    middle = ((numbers[1:] + numbers[:-1]) / 2).to(dtype)  # exact: one bit more than the format has
    far = torch.tensor(INF, dtype=dtype)
    points = torch.cat([middle, torch.nextafter(middle, far), torch.nextafter(middle, -far)])
    points = torch.cat([points, -points])
    expected = [round_exactly(x, target) for x in points.double().tolist()]
    assert_same(cast(points, target), expected)
    assert_same(nearest(points, target), expected)
    ties = cast(middle, target).double()
    places = [positives(target).index(x) for x in ties.tolist()]
    assert all(place % 2 == 0 for place in places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", FORMATS)
def test_beyond_the_largest_number_a_cast_saturates_and_a_nan_stays_one(
    target: FloatFormat, dtype: torch.dtype
) -> None:
    largest, least = target.largest, positives(target)[1]
    beyond = [INF, torch.finfo(dtype).max, largest * 1.125, largest]
    zeros = [0.0, torch.finfo(dtype).smallest_normal * 2.0**-10 if dtype != torch.float16 else 2.0**-24, least / 2]
    inputs, expected = [*beyond, *zeros, NAN], [largest] * 4 + [0.0] * 3 + [NAN]
    x = torch.tensor(inputs + [-each for each in inputs], dtype=dtype)
    assert_same(cast(x, target), expected + [-each for each in expected])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", FORMATS)
def test_any_number_goes_to_the_nearest(target: FloatFormat, dtype: torch.dtype) -> None:
    least, most = math.log2(positives(target)[1]) - 2, math.log2(target.largest) + 1
    x = torch.randn(500, dtype=torch.float64).sign() * 2 ** (least + (most - least) * torch.rand(500).double())
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    assert_same(cast(x, target), [round_exactly(each, target) for each in x.double().tolist()])


def test_a_double_is_rounded_once() -> None:
    """By way of float32, the least double above a midpoint would become the midpoint, and go to the even code."""
    for target in (E4M3, E5M2):
        low, high = positives(target)[10:12]
        middle = (low + high) / 2
        x = torch.tensor([math.nextafter(middle, INF), middle, math.nextafter(middle, -INF)], dtype=torch.float64)
        assert cast(x, target).double().tolist() == [high, low, low]
