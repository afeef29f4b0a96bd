"""When weight gradients are computed.

Key idea: the gradient of a linear layer's weight depends on nothing but what the layer already has, so it can wait.
Schedules that split the backward (Qi et al. 2023) send the input gradient on first and fill bubbles with the rest.
"""

from __future__ import annotations

from collections.abc import Callable


class WeightGradients:
    """Runs jobs at once or, while `deferred`, keeps them until somebody takes them."""

    def __init__(self) -> None:
        self.deferred = False
        self.jobs: list[Callable[[], None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Run `job` now or keep it."""
        if self.deferred:
            self.jobs.append(job)
        else:
            job()

    def take(self) -> list[Callable[[], None]]:
        """The jobs kept so far, in order; none is kept afterwards."""
        jobs, self.jobs = self.jobs, []
        return jobs
