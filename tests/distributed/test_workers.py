"""Worker processes end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import pytest

from megalite.distributed.workers import end_with_parent


def _work(connection: Connection, late: bool) -> None:
    parent = os.getppid()
    connection.send("started")
    while late and os.getppid() == parent:
        time.sleep(0.01)
    end_with_parent()
    time.sleep(300)


def _start_and_wait(method: str, connection: Connection, late: bool) -> None:
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_work, args=(connection, late)) for _ in range(2)]
    for worker in workers:
        worker.start()
    connection.close()
    for worker in workers:
        worker.join()


@pytest.mark.parametrize("late", [False, True], ids=["while they work", "before they could ask"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_when_their_parent_is_killed(method: str, late: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=_start_and_wait, args=(method, theirs, late))
    parent.start()
    theirs.close()
    assert [ours.recv(), ours.recv()] == ["started", "started"]
    parent.kill()
    assert ours.poll(60)
    with pytest.raises(EOFError):  # nobody holds the other end any more
        ours.recv()
    parent.join()
