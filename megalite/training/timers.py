"""Named timers for `--timing-log-level`: 0 none, 1 the phases of a step, 2 their parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Timers:
    """Sums the time of named sections between two log lines. On CUDA a timed section waits for the device."""

    def __init__(self, level: int, device: torch.device):
        self.level, self.device = level, device
        self.totals: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the block, where `level` is asked for."""
        if level > self.level:
            yield
            return
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.totals[name] = self.totals.get(name, 0.0) + time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def line(self, iterations: int) -> str | None:
        """One line with mean milliseconds per iteration since the last call, or None; starts over."""
        if not self.totals:
            return None
        parts = [f"{name}: {1e3 * total / iterations:.2f}" for name, total in self.totals.items()]
        self.totals = {}
        return " time per iteration (ms) | " + " | ".join(parts)
