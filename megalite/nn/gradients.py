"""Where a layer puts the gradient of a weight, and when it is computed.

Key idea: a layer adds a weight's gradient straight to a wide tensor that it doesn't own. `parameter.gradient_sink`, set
by the optimizer's buckets, says which; asking only when the gradient is there lets that tensor exist only then. Without
a sink the layer returns its gradient to autograd as usual.

That gradient depends on nothing but what the layer already has, so it can wait. Schedules that split the backward (Qi
et al. 2023) send the input's gradient on first and fill bubbles with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class GradientSink(Protocol):
    """Takes one parameter's gradients."""

    def target(self) -> Tensor:
        """The wide tensor of the parameter's local shape to add a contribution to."""
        ...


def sink_of(parameter: Tensor) -> GradientSink | None:
    """The sink of a parameter, where it has one."""
    sink: GradientSink | None = getattr(parameter, "gradient_sink", None)
    return sink


class WeightGradients:
    """Keeps the jobs that layers leave here while `deferred`, until somebody takes them."""

    def __init__(self) -> None:
        self.deferred = False
        self.jobs: list[Callable[[], None]] = []

    def then(self, job: Callable[[], None]) -> None:
        """Do `job` once the weight gradients of the backward so far are computed: now, or after those kept here."""
        if self.deferred:
            self.jobs.append(job)
        else:
            job()

    def take(self) -> list[Callable[[], None]]:
        """The jobs kept so far, in order; none is kept afterwards."""
        jobs, self.jobs = self.jobs, []
        return jobs
