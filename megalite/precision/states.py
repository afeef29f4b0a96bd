"""How the optimizer's states are held in few bits.

Key idea: a state is read up to the wide dtype, updated there, and rounded *stochastically* to one of the two numbers
around it, with the chances that make its mean right. Rounding to the nearest loses every change below half a spacing: a
second moment in bf16 then never falls (0.999 of a number rounds to itself), and a weight in bf16 stands still at small
learning rates.

bf16 has the range of fp32. The other formats hold a state divided by a power of two, one for each logical parameter,
which the largest magnitude fits (Peng et al. 2023, FP8-LM): so the numbers that they stand for are exact in the wide
dtype, and a checkpoint of those loads anywhere. A second moment above zero stays above zero: at zero the update, which
its root divides, would be without bound. What is too small for the format is raised, so its steps are too short.

Eight bits hold a first moment in E4M3, and a second one as a logarithm: it has no sign, and 254 steps of 2^(1/8) cover
2^31.75 evenly, where its root in E4M3 would take steps of up to a quarter. Held so, a second moment with a beta2 of
0.999 varies by 20 % around its mean from rounding (bf16: 4 %; the root in E4M3: 28 %), and updates are 1.5 % larger on
average.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.precision.formats import E4M3, FloatFormat, exponent, power_of_two

BF16 = FloatFormat("BF16", 7, -126, torch.finfo(torch.bfloat16).max, torch.bfloat16)
FP16 = FloatFormat("FP16", 10, -14, 65504.0, torch.float16)


class StateNames(NamedTuple):
    """The format of each kind of state, as the flags name it; fp32 is the wide dtype."""

    main_grads: str = "fp32"
    main_params: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> StateNames:
        return cls(*(getattr(config, f"{kind}_dtype") for kind in cls._fields))


WIDE = StateNames()


class StateFormat(Protocol):
    """`dtype`: of a state's elements. `scaled`: they stand for numbers divided by a power of two, so that none is above
    `largest`."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def scaled(self) -> bool: ...

    @property
    def largest(self) -> float: ...

    def encode(self, x: Tensor, uniform: Tensor) -> Tensor:
        """What to store for `x`, wide: exact in `dtype`. `uniform`: numbers in [0, 1), one for each."""
        ...

    def decode(self, stored: Tensor, wide: torch.dtype) -> Tensor:
        """The numbers that elements stand for."""
        ...


@dataclass(frozen=True)
class FloatState:
    """Numbers of a floating-point format. `above_zero`: what is above zero stays there."""

    target: FloatFormat
    scaled: bool = True
    above_zero: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def largest(self) -> float:
        return self.target.largest

    def encode(self, x: Tensor, uniform: Tensor) -> Tensor:
        """The number below `x` or the one above it: the latter where `uniform` is less than the part of the way from
        one to the other. Numbers of the format stay as they are."""
        if self.above_zero:
            x = torch.where(x > 0, x.clamp(min=2.0 ** (self.target.least_exponent - self.target.mantissa_bits)), x)
        x = x.clamp(-self.largest, self.largest)
        lowest, bits = self.target.least_exponent, self.target.mantissa_bits
        spacing = power_of_two(exponent(x).clamp(min=lowest) - bits, x)
        steps = x / spacing
        below = steps.floor()
        return (below + (uniform < steps - below)) * spacing

    def decode(self, stored: Tensor, wide: torch.dtype) -> Tensor:
        return stored.to(wide)


class LogarithmState:
    """Numbers from 0 to 1 as one of 256 codes: 0 for zero, k for 2^((k - 255) / 8)."""

    dtype, scaled, largest = torch.uint8, True, 1.0

    def encode(self, x: Tensor, uniform: Tensor) -> Tensor:
        """The code below or above, unbiased as `FloatState`'s; above zero never that of zero."""
        table = _powers(x.dtype, x.device)
        x = torch.where(x > 0, x.maximum(table[1]).clamp(max=1.0), x)
        code = (torch.searchsorted(table, x, right=True) - 1).clamp(max=254)
        below, above = table[code], table[code + 1]
        return code + (uniform < (x - below) / (above - below))

    def decode(self, stored: Tensor, wide: torch.dtype) -> Tensor:
        return _powers(wide, stored.device)[stored.int()]


@functools.cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    # By octaves: then half of each is exactly that of the code 8 below, under any power-of-two scale.
    octaves = (divmod(code - 255, 8) for code in range(1, 256))
    numbers = (math.ldexp(2.0 ** (part / 8), whole) for whole, part in octaves)
    return torch.tensor([0.0, *numbers], dtype=dtype, device=device)


def state_formats(names: StateNames) -> dict[str, StateFormat | None]:
    """By the kind of state in checkpoints. None: the wide dtype."""
    formats: dict[str, dict[str, StateFormat]] = {
        "main": {"bf16": FloatState(BF16, scaled=False), "fp16": FloatState(FP16)},
        "exp_avg": {"bf16": FloatState(BF16, scaled=False), "fp16": FloatState(FP16), "fp8": FloatState(E4M3)},
        "exp_avg_sq": {
            "bf16": FloatState(BF16, scaled=False, above_zero=True),
            "fp16": FloatState(FP16, above_zero=True),
            "fp8": LogarithmState(),
        },
    }
    chosen = {"main": names.main_params, "exp_avg": names.exp_avg, "exp_avg_sq": names.exp_avg_sq}
    return {kind: formats[kind].get(name) for kind, name in chosen.items()}


def fitting_scale(amax: Tensor, largest: float) -> Tensor:
    """The least power of two that divides `amax` to `largest` or below; 1 for zeros."""
    mantissa, above = torch.frexp(amax)
    top, top_above = math.frexp(largest)
    scale = power_of_two(above - top_above + (mantissa > top).int(), amax)
    return torch.where(amax > 0, scale.clamp(min=torch.finfo(amax.dtype).tiny), 1.0)
