"""A run that hangs ends within its bound, and says where all of its ranks were."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megalite.training import watchdog
from megalite.training.watchdog import Watchdog, stacks
from tests.e2e.runs import MICRO, NEEDS_PROC, Forked, run


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "GRACE", 0.2)
    return codes


def test_a_run_that_moves_on_is_left_alone(exits: list[int], tmp_path: Path) -> None:
    dog = Watchdog(1.0, 0, tmp_path, None)
    for _ in range(13):
        time.sleep(0.1)
        dog.moved("step")
    dog.close()
    assert not dog.thread.is_alive() and exits == [] and list(tmp_path.iterdir()) == []


def test_stacks_are_added_to_those_of_an_earlier_attempt(
    exits: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("step 1", "step 2"):
        dog = Watchdog(0.1, 3, tmp_path, None)
        dog.moved(step)
        dog.thread.join(30)
        dog.close()
    texts = (tmp_path / "stacks-rank-3.txt").read_text(), capsys.readouterr().err
    for text in texts:
        assert all(f"no step within --step-timeout 0.1 s; at step {step} for" in text for step in (1, 2))
    assert exits == [1, 1]


def test_the_stacks_name_each_thread_and_where_it_is() -> None:
    here, leave = threading.Event(), threading.Event()

    def waiting_for_another() -> None:
        here.set()
        leave.wait()

    thread = threading.Thread(target=waiting_for_another, name="one that waits")
    thread.start()
    here.wait()
    got: list[str] = []
    asking = threading.Thread(target=lambda: got.append(stacks()))
    asking.start()
    asking.join()
    leave.set()
    thread.join()
    assert got[0].startswith("thread MainThread:\n")
    assert got[0].index("test_the_stacks_name") < got[0].index("thread one that waits:\n")
    assert f'File "{__file__}"' in got[0] and "waiting_for_another" in got[0]


@NEEDS_PROC
def test_all_ranks_write_their_stacks_before_any_ends(tmp_path: Path) -> None:
    """Of three only one hangs, and each would find out by itself; the flag bounds how long it takes."""
    flags = f"{MICRO} --global-batch-size 6 --train-iters 1000 --save {tmp_path} --num-workers 1 --step-timeout 4"
    started = Forked(flags, 3, fault="sleep:1:3,grace:0:1,grace:1:1,grace:2:1")
    outcome = started.wait(4 + 30)
    assert outcome.codes == (1, 1, 1)
    assert started.remaining(5) == []
    for rank in range(3):
        text = (tmp_path / f"stacks-rank-{rank}.txt").read_text()
        assert text in outcome.err
        assert f"rank {rank} (process" in text.splitlines()[0] and "at step 3 for" in text.splitlines()[0]
        assert ("in _sleep.<locals>.<lambda>" in text) == (rank == 1)
        assert "in train" in text and "thread MainThread:\n" in text
    assert "no step within --step-timeout 4 s" in outcome.err


def test_a_library_that_holds_the_interpreter_does_not_keep_a_rank_alive() -> None:
    outcome = run(
        f"{MICRO} --train-iters 1000 --step-timeout 3", fault="held:0:3,grace:0:2", check=False, timeout=3 + 30
    )
    assert outcome.codes == (1,)
    assert "Timeout" in outcome.err and "in _forward\n" in outcome.err
