"""Ending a run between two steps: signals, a time limit, an interval.

Key idea: a signal only sets a flag. All ranks agree on what they saw before any acts on it, so they stop at the same
step whichever of them was told.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import torch

from megalite.config.schema import TrainingConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh


class StopRequests:
    """Collects reasons to stop. Installs handlers for SIGTERM and SIGINT where `--exit-signal-handler` asks."""

    def __init__(self, config: TrainingConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.began = time.monotonic()
        self.received = 0
        if config.exit_signal_handler:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == 0 and self.mesh.is_first:
            sys.stderr.write(
                f"{signal.Signals(number).name}: finishing this step and saving. torchrun kills its workers 30 s after "
                "SIGTERM; a save that takes longer needs torchrun --shutdown-timeout SECONDS\n"
            )
        self.received = number

    def reason(self, iteration: int) -> str | None:
        """Why all ranks stop after `iteration`, or None. Collective over the world where time or signals count."""
        interval, minutes = self.config.exit_interval, self.config.exit_duration_in_mins
        if self.config.exit_signal_handler or minutes is not None:
            late = minutes is not None and (time.monotonic() - self.began) / 60.0 > minutes
            seen = torch.tensor([self.received, int(late)], device=self.mesh.device)
            received, late_anywhere = all_reduce(seen, self.mesh.world, "max").tolist()
            if received:
                return f"received {signal.Signals(received).name}"
            if late_anywhere:
                return f"ran for --exit-duration-in-mins {minutes}"
        if interval is not None and iteration % interval == 0:
            return f"reached a multiple of --exit-interval {interval}"
        return None
