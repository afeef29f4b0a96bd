"""Scales of whole tensors and of blocks: their rules against the definitions, in exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite.config.check_precision import FP8_BLOCKS
from megalite.precision.formats import E4M3, E5M2, FloatFormat, nearest, power_of_two
from megalite.precision.scaling import (
    RECIPES,
    Block,
    Recipe,
    amax_of,
    block_amax,
    fit,
    fit_power_of_two,
    quantize,
    quantize_blocks,
    scale_of,
    shared_exponent,
)

FORMATS = [pytest.param(target, id=target.name) for target in (E4M3, E5M2)]
WIDE = (torch.float32, torch.float64)
BLOCKED = [recipe for recipe in RECIPES.values() if recipe.block]
NAN, INF = math.nan, math.inf


def magnitudes(dtype: torch.dtype) -> Tensor:
    """From the least normal number to the largest one, with powers of two and what is next to them."""
    info = torch.finfo(dtype)
    exponents = torch.arange(math.frexp(info.tiny)[1], math.frexp(info.max)[1] - 1, 3)
    mantissas = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.25], dtype=torch.float64)
    numbers = torch.ldexp(mantissas[:, None], exponents.double()).flatten().to(dtype)
    far = torch.tensor(INF, dtype=dtype)
    numbers = torch.cat([numbers, numbers.nextafter(far), numbers.nextafter(-far)])
    return torch.cat([numbers.clamp(min=info.tiny), torch.tensor([info.max], dtype=dtype)])


@pytest.mark.parametrize("dtype", WIDE)
def test_powers_of_two_are_exact_over_the_range_of_the_dtype(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    exponents = range(math.frexp(info.tiny)[1] - 2, math.frexp(info.max)[1])  # from half of the least normal number
    found = power_of_two(torch.tensor(exponents, dtype=torch.int32), torch.zeros(len(exponents), dtype=dtype))
    assert found.dtype == dtype
    assert found.tolist() == [math.ldexp(1.0, exponent) for exponent in exponents]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("target", FORMATS)
def test_a_fitted_scale_takes_amax_to_the_largest_number(target: FloatFormat, dtype: torch.dtype) -> None:
    amax = magnitudes(dtype)
    amax = amax[amax > target.largest * torch.finfo(dtype).tiny]
    near = amax / fit(amax, target) / target.largest
    torch.testing.assert_close(near, torch.ones_like(near), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(nearest(amax / fit(amax, target), target), torch.full_like(amax, target.largest))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("target", FORMATS)
def test_a_fitted_power_of_two_never_saturates_and_is_the_smallest_that_does_not(
    target: FloatFormat, dtype: torch.dtype
) -> None:
    amax = magnitudes(dtype)
    amax = amax[amax > 2 * target.largest * torch.finfo(dtype).tiny]
    scale = fit_power_of_two(amax, target)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert bool((amax <= target.largest * scale).all())
    assert bool((amax > target.largest * (scale / 2)).all())


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("target", FORMATS)
def test_an_mx_scale_is_the_exponent_of_amax_less_that_of_the_largest_number(
    target: FloatFormat, dtype: torch.dtype
) -> None:
    """OCP Microscaling Formats 1.0, section 6.3: the largest power of two in the block, divided by that of the element
    format; an E8M0 number is 2^-127 to 2^127."""
    amax = magnitudes(dtype)
    largest_exponent = {"E4M3": 8, "E5M2": 15}[target.name]
    expected = [2.0 ** max(-127, min(127, math.frexp(x)[1] - 1 - largest_exponent)) for x in amax.tolist()]
    scale = shared_exponent(amax, target)
    assert scale.tolist() == expected
    assert torch.equal(scale.to(torch.float8_e8m0fnu).to(dtype), scale)
    assert scale.min() == 2.0**-127
    assert scale.max() == (2.0 ** (127 - largest_exponent) if dtype == torch.float32 else 2.0**127)


def test_an_amax_of_odd_numbers_is_infinite() -> None:
    for x, expected in (([1.0, -3.0], 3.0), ([0.0, NAN], INF), ([-INF, 1.0], INF), ([0.0, -0.0], 0.0)):
        assert amax_of(torch.tensor(x, dtype=torch.bfloat16), torch.float32) == expected
        assert amax_of(torch.tensor(x), torch.float64).dtype == torch.float64


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("target", FORMATS)
def test_zeros_have_the_scale_1_and_what_is_not_finite_has_none(recipe: Recipe, target: FloatFormat) -> None:
    amax = torch.tensor([0.0, INF, NAN, 1.0])
    zeros, infinite, nan, one = scale_of(amax, recipe, target).tolist()
    assert zeros == 1.0
    assert math.isnan(infinite) and math.isnan(nan)
    assert one == recipe.rule(torch.tensor(1.0), target)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (128, 1), (1, 16), (3, 5)])
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (128, 256), (5, 40)])
def test_blocks_at_an_edge_hold_what_is_left(block: Block, shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    (m, k), (rows, columns) = shape, block
    expected = [
        [x[i : i + rows, j : j + columns].abs().max().item() for j in range(0, k, columns)] for i in range(0, m, rows)
    ]
    assert block_amax(x, block).tolist() == expected


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("recipe", BLOCKED, ids=[recipe.name for recipe in BLOCKED])
@pytest.mark.parametrize("target", FORMATS)
def test_each_block_is_quantised_as_if_it_were_alone(recipe: Recipe, target: FloatFormat, wide: torch.dtype) -> None:
    for block in dict.fromkeys([recipe.block, recipe.weight_block]):
        assert block is not None
        m, k = (131 if block[0] > 1 else 5), 200
        x = torch.randn(m, k, dtype=wide) * torch.exp(4 * torch.randn(m, 1, dtype=wide))
        found = quantize_blocks(x, recipe, target, block, wide)
        assert found.data.dtype == target.dtype
        values, back = found.dequantize(), found.transposed().dequantize()
        assert torch.equal(values.t(), back)
        for i in range(0, m, block[0]):
            for j in range(0, k, block[1]):
                part = x[i : i + block[0], j : j + block[1]]
                scale = recipe.rule(part.abs().max(), target)
                alone = nearest(part / scale, target) * scale
                assert torch.equal(values[i : i + block[0], j : j + block[1]], alone)


@pytest.mark.parametrize("recipe", BLOCKED, ids=[recipe.name for recipe in BLOCKED])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_number_spoils_its_block_and_no_other(recipe: Recipe, bad: float) -> None:
    for block in dict.fromkeys([recipe.block, recipe.weight_block]):
        assert block is not None
        x = torch.randn(130, 140)
        spoiled = x.clone()
        spoiled[129, 135] = bad
        found = quantize_blocks(spoiled, recipe, E4M3, block, torch.float32).dequantize()
        expected = quantize_blocks(x, recipe, E4M3, block, torch.float32).dequantize()
        first = [129 // block[0] * block[0], 135 // block[1] * block[1]]
        expected[first[0] : first[0] + block[0], first[1] : first[1] + block[1]] = NAN
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert found.isnan().any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_one_bad_number_spoils_a_tensor_of_one_scale(name: str, bad: float) -> None:
    x = torch.randn(4, 6)
    x[2, 3] = bad
    scale = scale_of(amax_of(x, torch.float32), RECIPES[name], E5M2)
    assert quantize(x, scale, E5M2).dequantize().isnan().all()


@pytest.mark.parametrize(
    "dtype, wide",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_the_error_of_a_number_is_at_most_half_a_unit_in_its_last_place(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Where amax is in range: tensors of one scale and blocks of power-of-two scales."""
    x = torch.randn(64, 300, dtype=torch.float64).to(dtype)
    for target in (E4M3, E5M2):
        whole = quantize(x, scale_of(amax_of(x, wide), RECIPES["tensorwise"], target), target)
        blocks = quantize_blocks(x, RECIPES["blockwise"], target, (1, 128), wide)
        for found in (whole, blocks):
            scale = found.scale if found is whole else found.scale.repeat_interleave(128, 1)[:, :300]
            exact = x.to(wide)
            floor = scale * 2.0 ** (target.least_exponent - 1 - target.mantissa_bits)
            bound = torch.maximum(exact.abs() * 2.0 ** -(target.mantissa_bits + 1), floor)
            error = (found.dequantize() - exact).abs()
            assert found.dequantize().dtype == wide
            assert bool((error <= bound * (1 + 4 * torch.finfo(wide).eps)).all())


def test_the_blocks_that_flags_are_checked_by_are_those_of_the_recipes() -> None:
    assert {name: recipe.block[1] for name, recipe in RECIPES.items() if recipe.block} == FP8_BLOCKS
