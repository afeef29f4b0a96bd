"""When weight gradients are computed.

Key idea: the gradient of a linear layer's weight depends on nothing but what the layer already has, so it can wait.
Schedules that split the backward (Qi et al. 2023) send the input gradient on first and fill bubbles with the rest.
"""

from __future__ import annotations

from collections.abc import Callable


class WeightGradients:
    """Keeps the jobs that layers leave here while `deferred`, until somebody takes them."""

    def __init__(self) -> None:
        self.deferred = False
        self.jobs: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        """The jobs kept so far, in order; none is kept afterwards."""
        jobs, self.jobs = self.jobs, []
        return jobs
