"""Processes that work for another one: signals that stop it don't reach them, and they end when it does.

The key idea: a process that is killed closes its end of the pipe that `multiprocessing` keeps between it and each of
its children, so a thread in the child that waits for that sees it on every system. Children that were forked later hold
the pipe too; they end first, since they watch as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Keep signals from this thread until the end of the block, and for ever from processes that are started in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Have this process end when the one that started it does, whatever it is at then."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child of multiprocessing"
    parent.join()
    os._exit(1)
