"""Ending a run between two steps: signals, a time limit, an interval.

Key idea: a signal only sets a number. All ranks agree on what they saw before any acts on it, so they stop at the same
step whichever of them was told.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import torch

from megalite.config.schema import TrainingConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST: dict[int, float] = {signal.SIGINT: 0.5, signal.SIGTERM: 5.0}
"""Seconds within which the same request may come once more: to the process's group, and from its launcher, which may be
slow to pass on SIGTERM; a key is pressed again soon."""


def _to_the_thread(number: int, frame: FrameType | None) -> None:
    """The handler of signals that a thread reads."""


class StopRequests:
    """Collects reasons to stop. Where `--exit-signal-handler` asks for it, the first SIGTERM or SIGINT is one, and
    another after it ends the process at once.

    A thread reads the signals, as numbers that the interpreter writes into a socket when they come: so the second one
    counts also while the main thread waits in a library for ranks that never answer.
    """

    def __init__(self, config: TrainingConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.began = time.monotonic()
        self.received = 0
        if config.exit_signal_handler:
            incoming, self._outgoing = socket.socketpair()
            self._outgoing.setblocking(False)
            signal.set_wakeup_fd(self._outgoing.fileno(), warn_on_full_buffer=False)
            for number in _STOPPING:
                signal.signal(number, _to_the_thread)
            threading.Thread(target=self._listen, args=(incoming,), name="signals", daemon=True).start()

    def _listen(self, incoming: socket.socket) -> None:
        first = 0.0
        while numbers := incoming.recv(1):
            number, now = numbers[0], time.monotonic()
            if number not in _STOPPING:
                continue
            if self.received == 0:
                first = now
                if self.mesh.is_first:
                    sys.stderr.write(
                        f"{signal.Signals(number).name}: finishing this step and saving; Ctrl-C again, or "
                        "SIGTERM after 5 s, ends at once. torchrun kills its workers 30 s after SIGTERM; a "
                        "save that takes longer needs torchrun --shutdown-timeout SECONDS\n"
                    )
                    sys.stderr.flush()
                self.received = number
            elif now - first > _ONE_REQUEST[number]:
                os._exit(128 + number)

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
