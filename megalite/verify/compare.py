"""How far two traces are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.verify.trace import Trace

_FLOOR = 1e-6  # of the gradient norm: a gradient that is zero in exact arithmetic isn't judged by its noise


@dataclass(frozen=True)
class Difference:
    """Largest relative differences. `parameters`: of each gradient, the worst first. `bitwise`: losses and norms equal
    to the last bit."""

    loss: float
    norm: float
    parameters: dict[str, float]
    bitwise: bool

    @property
    def worst(self) -> float:
        """The largest of all; infinite where something isn't a number."""
        return max(self.loss, self.norm, *self.parameters.values(), 0.0)


def _relative(a: list[float], b: list[float]) -> float:
    differences = [abs(x - y) / max(abs(y), 1e-300) for x, y in zip(a, b, strict=True)]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def compare(mine: Trace, truth: Trace) -> Difference:
    """`mine` against `truth`: for a gradient, max |a - b| over the larger of max |b| and 10^-6 of the gradient norm.

    A ValueError names parameters that only one of them has.
    """
    if mine.gradients.keys() != truth.gradients.keys():
        raise ValueError(f"only one side has {sorted(mine.gradients.keys() ^ truth.gradients.keys())}")
    parameters = {}
    for name, gradient in truth.gradients.items():
        scale = max(gradient.abs().max().item(), _FLOOR * truth.norms[0])
        distance = (mine.gradients[name] - gradient).abs().max().item() / scale
        parameters[name] = distance if math.isfinite(distance) else math.inf
    return Difference(
        loss=_relative(mine.losses, truth.losses),
        norm=_relative(mine.norms, truth.norms),
        parameters=dict(sorted(parameters.items(), key=lambda item: -item[1])),
        bitwise=mine.losses == truth.losses and mine.norms == truth.norms,
    )
