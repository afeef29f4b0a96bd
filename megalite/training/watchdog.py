"""Ends a run that hangs, with the Python stacks of all its ranks.

Key idea: a rank that hangs leaves the others waiting in collectives, so each has a thread that looks whether its own
run moves on. The first that doesn't calls all others, over the connections of `distributed/peers.py`, which no device
has a part in; each writes its stacks, and all exit after a pause that is long enough for everyone to write.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from megalite.config.schema import RunConfig
from megalite.distributed.launch import tell_failure
from megalite.distributed.peers import Watch
from megalite.files.remote import is_address

GRACE = 5.0
"""Seconds from the call until the processes end."""
_LOOK = 1.0  # seconds between two looks
_HELD = 3.0  # seconds after which the interpreter's C thread does what this module's thread couldn't
_STDERR = 2


@contextmanager
def watching(config: RunConfig, rank: int, watch: Watch | None) -> Iterator[Callable[[str], object]]:
    """While the block runs, end the run when it doesn't move on within `--step-timeout`: when what this gives isn't
    called, with a name of what is done next."""
    seconds = config.training.step_timeout
    if seconds is None:
        yield lambda _: None
        return
    folder = config.checkpoint.save or "."
    watchdog = Watchdog(seconds, rank, Path("." if is_address(folder) else folder), watch)
    try:
        yield watchdog.moved
    finally:
        watchdog.close()


class Watchdog:
    """Looks whether `moved` is called at least every `seconds`. Stacks go to standard error and to
    `folder/stacks-rank-N.txt`, after those of an earlier attempt. `watch`: over the other ranks, where there are any.
    """

    def __init__(self, seconds: float, rank: int, folder: Path, watch: Watch | None):
        self.seconds, self.rank, self.file, self.watch = seconds, rank, folder / f"stacks-rank-{rank}.txt", watch
        self._woken, self._closed = threading.Event(), False
        self.moved("starting")
        if watch is not None:
            watch.on_call = self._woken.set
        self.thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self.thread.start()

    def moved(self, next_is: str) -> None:
        """The run moves on, to `next_is`."""
        self._last = next_is, time.monotonic()

    def close(self) -> None:
        """The run ends by itself."""
        self._closed = True
        self._woken.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while (remaining := self._last[1] + self.seconds - time.monotonic()) > 0:
            # A library may hold the interpreter while it hangs, and then this thread has no turn.
            faulthandler.dump_traceback_later(remaining + _HELD, exit=True, file=_STDERR)
            if self._woken.wait(min(remaining, _LOOK)):
                if self._closed:
                    return
                self._end("stopped, because another rank hangs")
        self._end(f"no step within --step-timeout {self.seconds:g} s")

    def _end(self, reason: str) -> None:
        """Call the others, write the stacks and exit, whatever becomes of the writing: what hangs may be the file
        system, or who reads standard error."""
        faulthandler.dump_traceback_later(2 * GRACE, exit=True, file=_STDERR)
        if self.watch is not None:
            threading.Thread(target=self.watch.call, daemon=True).start()
        doing, since = self._last
        where = f"rank {self.rank} (process {os.getpid()} on host {socket.gethostname()})"
        message = f"{where}: {reason}; at {doing} for {time.monotonic() - since:.1f} s"
        text = f"{datetime.now():%Y-%m-%d %H:%M:%S} {message}\n{stacks()}\n"
        for write in (self._to_file, self._to_stderr):
            threading.Thread(target=write, args=(message, text), daemon=True).start()
        time.sleep(GRACE)
        os._exit(1)

    def _to_file(self, _: str, text: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(text)

    def _to_stderr(self, message: str, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
        tell_failure(f"error: {message}; the stacks of all ranks are in {self.file.with_name('stacks-rank-*.txt')}")


def stacks() -> str:
    """Where each Python thread of this process is, the main thread first, the innermost call last. No source is read:
    its file system may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    mine = threading.get_ident()
    main = threading.main_thread().ident
    order = sorted((ident for ident in frames if ident != mine), key=lambda ident: ident != main)
    return "\n".join(f"thread {names.get(ident, ident)}:\n" + "\n".join(_calls(frames[ident])) for ident in order)


def _calls(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
        frame = frame.f_back
    return lines[::-1]
