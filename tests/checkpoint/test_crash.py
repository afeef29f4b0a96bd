"""Whenever a save is killed, a complete checkpoint can be found and loaded.

The saves run in processes forked from one that has torch loaded and no threads yet: this file, run as a program.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import Retention
from tests.checkpoint.logical import found
from tests.checkpoint.one_tensor import names, save, value_of
from tests.helpers import call_script

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
    checkpoint = found(root)
    assert value_of(checkpoint.path) in (checkpoint.iteration, checkpoint.iteration + 0.5), checkpoint
    return checkpoint.iteration


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


def test_a_kill_at_any_event_on_the_disk_leaves_a_complete_checkpoint_and_the_next_save_clears_up(
    tmp_path: Path,
) -> None:
    result = call_script(Path(__file__), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) > 25, lines
    assert lines[-1] == f"events {len(lines) - 1}"


if __name__ == "__main__":
    every_event(Path(sys.argv[1]))
