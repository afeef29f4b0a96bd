"""Number formats of few bits, and the cast to them.

Key idea: a cast is a pure function: the nearest number of the format, ties to even, and beyond the largest one that
largest one. How numbers are scaled to fit is another matter (`precision.scaling`).

E4M3 and E5M2: Micikevicius et al. 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """`least_exponent`: of normal numbers. `largest`: finite number. `dtype`: stores its numbers exactly."""

    name: str
    mantissa_bits: int
    least_exponent: int
    largest: float
    dtype: torch.dtype

    @property
    def limit(self) -> float:
        """Halfway from `largest` to what would be the next number: beyond it a cast saturates."""
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - 2 - self.mantissa_bits)


E4M3 = FloatFormat("E4M3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = FloatFormat("E5M2", 2, -14, 57344.0, torch.float8_e5m2)


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|), int32, exact; -1 for zero."""
    return torch.frexp(x).exponent - 1


def power_of_two(exponent: Tensor, like: Tensor) -> Tensor:
    """2^exponent in the dtype of `like`."""
    return torch.ldexp(torch.ones_like(like), exponent)


def nearest(x: Tensor, target: FloatFormat) -> Tensor:
    """The nearest numbers of the format in the dtype of `x` [any shape]: ties to even, ±`largest` beyond it and for
    infinities; a NaN stays one."""
    x = x.clamp(-target.largest, target.largest)
    spacing = power_of_two(exponent(x).clamp(min=target.least_exponent) - target.mantissa_bits, x)
    return (x / spacing).round() * spacing


def cast(x: Tensor, target: FloatFormat) -> Tensor:
    """`nearest` in the format's dtype."""
    if x.dtype == torch.float64:  # torch would cast by way of float32, which rounds twice
        return nearest(x, target).to(target.dtype)
    return x.clamp(-target.largest, target.largest).to(target.dtype)
