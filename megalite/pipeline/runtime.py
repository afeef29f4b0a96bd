"""Executes one rank's list of actions in order.

Key idea: the runtime knows neither model nor schedule. What a forward or backward means is the executor's business; the
order is the list's. A recorder, where given, notes when each action began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from megalite.pipeline.schedules import BACKWARD, FORWARD, Action


class Executor(Protocol):
    """Computes."""

    def forward(self, chunk: int, microbatch: int) -> None:
        """Run a chunk on a microbatch and keep what its backward needs."""
        ...

    def backward(self, chunk: int, microbatch: int) -> None:
        """Accumulate the gradients of a chunk for a microbatch and release what its forward kept."""
        ...


Recorder = Callable[[Action, float, float], None]
"""Called with an action and its begin and end in milliseconds of a monotonic clock."""


class PipelineRuntime:
    """Runs lists of actions on an executor."""

    def __init__(self, executor: Executor, recorder: Recorder | None = None, wait: Callable[[], None] | None = None):
        """`wait`: called before a time is taken, so that work queued on a device is counted where it belongs."""
        self.recorder = recorder
        self.wait = wait
        self.handlers: dict[str, Callable[[int, int], None]] = {
            FORWARD: executor.forward,
            BACKWARD: executor.backward,
        }

    def run(self, actions: Iterable[Action]) -> None:
        """Execute `actions` in order. An unknown kind raises a KeyError."""
        for action in actions:
            begin = self._now()
            self.handlers[action.kind](action.chunk, action.microbatch)
            if self.recorder is not None:
                self.recorder(action, begin, self._now())

    def _now(self) -> float:
        if self.recorder is not None and self.wait is not None:
            self.wait()
        return time.perf_counter() * 1e3
