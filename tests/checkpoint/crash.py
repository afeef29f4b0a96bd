"""Saves that are killed, in processes forked from one that has torch loaded. test_crash.py runs it as a process.

Prints one line for each trial that went right; any other end is a failure.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import Retention, find_checkpoint
from tests.checkpoint.one_tensor import names, save, value_of

DISK_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "shutil.rmtree"}


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child


def killed(child: int) -> bool:
    """Wait for a child: True where a kill ended it, False where it ended well."""
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"wait status {status}"
    return status != 0


def check(root: Path) -> int:
    """A complete checkpoint is found and holds one save's values throughout; its iteration."""
    found = find_checkpoint(root)
    assert found is not None
    assert value_of(found.path) in (found.iteration, found.iteration + 0.5), found
    return found.iteration


def save_for_ever(root: Path, first: int) -> None:
    iteration = first
    while True:
        save(root, iteration, Retention(keep_last=2))
        iteration += 1


def random_moments(root: Path, trials: int) -> None:
    """SIGKILL at a random moment of an endless row of saves, after none to two of them are done."""
    save(root, 1)
    begin = time.monotonic()
    save(root, 2)
    seconds = time.monotonic() - begin
    chance = random.Random(1234)
    for _ in range(trials):
        last = check(root)
        child = fork(lambda last=last: save_for_ever(root, last + 1))  # type: ignore[misc]
        done = last + chance.randint(0, 2)
        while check(root) < done:
            time.sleep(seconds / 100)
        time.sleep(chance.uniform(0.0, 1.5 * seconds))
        os.kill(child, signal.SIGKILL)
        assert killed(child)
        assert check(root) >= last
        print("killed at", check(root), flush=True)


def die_at(event_number: int, root: Path) -> None:
    """Save iteration 2 once more, replacing it and letting go of 1, and die at the given event on the disk."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in DISK_EVENTS:
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(root, 2, Retention(keep_last=1), value=2.5)


def every_event(base: Path) -> None:
    """SIGKILL at each event on the disk of one save, one trial each, then see that the next save clears up."""
    save(base / "start", 1)
    save(base / "start", 2)
    for event in range(1, 1000):
        root = base / "run"
        shutil.copytree(base / "start", root)
        dead = killed(fork(lambda event=event, root=root: die_at(event, root)))  # type: ignore[misc]
        assert check(root) == 2
        save(root, 3, Retention(keep_last=2))
        assert check(root) == 3
        assert names(root)[-3:] == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"], names(root)
        assert not [name for name in names(root) if name.endswith((".tmp", ".old"))], names(root)
        shutil.rmtree(root)
        if not dead:
            print("events", event - 1, flush=True)
            return
        print("killed at", event, flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "random":
        random_moments(folder, 20)
    else:
        every_event(folder)
