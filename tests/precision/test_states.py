"""Formats of states: a number goes to one of its two neighbours, and on average stays where it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.distributed import random
from megalite.precision.formats import E4M3
from megalite.precision.states import BF16, FP16, FloatState, LogarithmState, StateFormat, StateNames, fitting_scale

FORMATS: dict[str, StateFormat] = {
    "bf16": FloatState(BF16, scaled=False),
    "fp16": FloatState(FP16),
    "e4m3": FloatState(E4M3),
    "fp16 above zero": FloatState(FP16, above_zero=True),
    "logarithm": LogarithmState(),
}


def all_numbers(format: StateFormat) -> Tensor:
    """Those that a format has, ascending, float64: by torch's own reading of every code, or the formula."""
    if isinstance(format, LogarithmState):
        return torch.tensor([0.0, *(2.0 ** ((code - 255) / 8) for code in range(1, 256))], dtype=torch.float64)
    codes = torch.arange(1 << 8 * format.dtype.itemsize)
    kept = codes.to(torch.uint8 if format.dtype.itemsize == 1 else torch.uint16).view(format.dtype)
    numbers = kept.to(torch.float64)
    return numbers[numbers.isfinite()].unique()


def between(format: StateFormat, count: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """(below, x, above): random x in the format's range, and its neighbours; none is a number of the format."""
    numbers = all_numbers(format)
    place = (random.uniform(torch.tensor(1), torch.arange(count)) * (len(numbers) - 1)).long()
    part = 0.01 + 0.98 * random.uniform(torch.tensor(2), torch.arange(count))
    return numbers[place], torch.lerp(numbers[place], numbers[place + 1], part), numbers[place + 1]


def rounded(format: StateFormat, x: Tensor, uniform: Tensor) -> Tensor:
    """As it is stored and read back."""
    stored = torch.zeros(x.shape, dtype=format.dtype)
    stored.copy_(format.encode(x, uniform))
    return format.decode(stored, x.dtype).to(torch.float64)


@pytest.mark.parametrize("name", FORMATS)
def test_the_smallest_uniform_number_rounds_up_and_the_largest_down(name: str) -> None:
    format = FORMATS[name]
    below, x, above = between(format)
    if "above zero" in name or name == "logarithm":
        below = torch.where(x > 0, below.clamp(min=float(all_numbers(format)[all_numbers(format) > 0][0])), below)
    assert torch.allclose(rounded(format, x, torch.zeros_like(x)), above, rtol=1e-7, atol=0)
    assert torch.allclose(rounded(format, x, torch.full_like(x, 1 - 2**-17)), below, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_numbers_of_the_format_stay_whatever_the_uniform_number(name: str, wide: torch.dtype) -> None:
    numbers = all_numbers(FORMATS[name]).to(wide)
    for uniform in (0.0, 0.5, 1 - 2**-17):
        result = rounded(FORMATS[name], numbers, torch.full_like(numbers, uniform))
        assert torch.equal(result.to(wide), numbers)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_right_on_average(name: str) -> None:
    """The mean of many is within five standard errors, by the variance of a choice between two."""
    format, tries = FORMATS[name], 4096
    below, x, above = between(format, 50)
    chosen = below > 0 if "above zero" in name or name == "logarithm" else below == below
    below, x, above = below[chosen], x[chosen], above[chosen]
    uniform = random.bits(random.fold(7, "test"), torch.arange(tries * len(x))).view(tries, -1) & (1 << 17) - 1
    mean = rounded(format, x.expand(tries, -1), uniform * 2.0**-17).mean(0)
    error = ((x - below) * (above - x) / tries).sqrt()
    assert ((mean - x).abs() <= 5 * error + 2**-17 * (above - below)).all()


@pytest.mark.parametrize("name", ["fp16 above zero", "logarithm"])
def test_what_is_above_zero_stays_there_and_zero_stays_zero(name: str) -> None:
    tiny = torch.tensor([0.0, 1e-30, 1e-12, 1e-10])
    result = rounded(FORMATS[name], tiny, torch.full_like(tiny, 0.999))
    least = all_numbers(FORMATS[name])
    assert result.tolist() == pytest.approx([0.0, *3 * [float(least[least > 0][0])]])


def test_what_is_beyond_the_range_becomes_the_largest_number() -> None:
    x = torch.tensor([-1e6, 1e6])
    assert rounded(FORMATS["e4m3"], x, torch.zeros(2)).tolist() == [-448.0, 448.0]


@pytest.mark.parametrize("largest", [1.0, 448.0, 65504.0])
def test_a_scale_is_the_least_power_of_two_that_fits(largest: float) -> None:
    exact = [largest * 2.0**power for power in (-9, 0, 5)]
    for amax in [*exact, *(math.nextafter(x, math.inf) for x in exact), 1.0, 3e-7, 1234.5]:
        scale = fitting_scale(torch.tensor(amax, dtype=torch.float64), largest).item()
        assert math.frexp(scale)[0] == 0.5
        assert amax / scale <= largest < 2 * amax / scale
    assert fitting_scale(torch.zeros(2), largest).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["fp16", "e4m3", "logarithm"])
def test_what_was_rounded_is_exact_under_the_scale_of_its_own_largest_number(name: str) -> None:
    """So a checkpoint of the wide numbers gives back the same ones."""
    format = FORMATS[name]
    for seed in range(20):
        x = 2.0 ** (20 * random.normal(torch.tensor(seed), torch.arange(40))).abs().neg().to(torch.float32)
        scale = fitting_scale(x.max(), format.largest)
        held = rounded(format, x / scale, random.uniform(torch.tensor(99), torch.arange(40))).to(x.dtype) * scale
        again = fitting_scale(held.max(), format.largest)
        assert torch.equal(rounded(format, held / again, torch.rand(40)).to(x.dtype) * again, held)


def test_names_come_from_the_flags() -> None:
    config = PrecisionConfig(main_grads_dtype="bf16", exp_avg_sq_dtype="fp8")
    assert StateNames.from_config(config) == ("bf16", "fp32", "fp32", "fp8")
