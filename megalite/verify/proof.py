"""Runs a layout and one process, and compares them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.pool import ProcessPool
from megalite.verify.configs import on_one_process, resolved
from megalite.verify.trace import Trace, trace

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


Tracer = Callable[..., Trace | None]  # called as `trace` is


@dataclass
class Prover:
    """Compares configurations (for proof, unresolved) with one process on a pool of worker processes.

    One-process traces are kept, since many layouts share one. `timeout`: seconds for one run. `progress`: is told each
    part as it begins, and then steps are shown by a bar.
    """

    pool: ProcessPool
    steps: int = 10
    timeout: float = 300.0
    progress: Callable[[str], None] | None = None
    _truths: dict[str, Trace] = field(default_factory=dict)

    def prove(self, config: RunConfig, world_size: int, *, tracer: Tracer = trace) -> Difference:
        """How far `config` on `world_size` processes is from one process."""
        given = resolved(config, world_size)
        self._tell(f"1 of 2: the layout, {self.steps} steps (starting {world_size} processes takes a while)")
        mine = self._trace(given, world_size, tracer)
        one = on_one_process(config)
        # Batch sizes that follow from the data-parallel size are those of the layout.
        one.training.global_batch_size = given.training.global_batch_size
        single = resolved(one, 1)
        key = json.dumps(single.to_dict(), sort_keys=True)
        if key not in self._truths:
            self._tell(f"2 of 2: one process, {self.steps} steps")
            self._truths[key] = self._trace(single, 1, trace)
        return compare(mine, self._truths[key])

    def _tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def _trace(self, config: RunConfig, world_size: int, tracer: Tracer) -> Trace:
        layout = Layout.from_config(config.layout, world_size)
        traced = tracer if self.progress is None else partial(tracer, bar=True)
        results = self.pool.run(traced, world_size, config.to_dict(), self.steps, layout=layout, timeout=self.timeout)
        assert isinstance(results[0], Trace)
        return results[0]
