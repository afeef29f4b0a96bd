"""SIGKILL at random moments: every run goes on from what is there, and ends as one that was left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.e2e.runs import MICRO, Forked, assert_same_checkpoint, checkpoint, run, written

STEPS = 6
FLAGS = (
    f"{MICRO} --bf16 --use-distributed-optimizer --num-workers 1 --train-iters {STEPS} --save-interval 1 "
    "--keep-last-checkpoints 2 "
)
PROCESSES = 2


def flags_of(folder: Path, background: bool) -> str:
    places = f"--save {folder} --load {folder} --metrics-file {folder}/m.jsonl"
    return f"{FLAGS} {places} {'--async-save' if background else ''}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(flags_of(folder, False), PROCESSES)
    return folder


def kill_somewhere(folder: Path, flags: str, chance: random.Random, *, inside_a_save: bool) -> None:
    """Start the run and kill all of it: after some step, and perhaps then in the midst of writing."""
    steps_done, deadline = chance.randrange(STEPS), time.monotonic() + 60
    started = Forked(flags, PROCESSES)

    def reached() -> bool:
        path = folder / "m.jsonl"
        done = len(path.read_text().splitlines()) if path.exists() else 0
        return done >= steps_done and (not inside_a_save or bool(list(folder.glob("iter_*.tmp"))))

    while not reached() and started.members() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.03))
    started.kill()


FAST = {(True, 0)}
TRIALS = [
    pytest.param(background, trial, marks=() if (background, trial) in FAST else pytest.mark.slow)
    for background in (False, True)
    for trial in range(10)
]


@pytest.mark.parametrize(("background", "trial"), TRIALS)
def test_a_killed_run_ends_as_one_that_was_left_alone(
    background: bool, trial: int, undisturbed: Path, tmp_path: Path
) -> None:
    chance, flags = random.Random(trial), flags_of(tmp_path, background)
    kill_somewhere(tmp_path, flags, chance, inside_a_save=trial % 3 == 0)
    run(flags, PROCESSES)
    assert written(tmp_path / "m.jsonl") == written(undisturbed / "m.jsonl")
    assert_same_checkpoint(checkpoint(tmp_path, STEPS), checkpoint(undisturbed, STEPS))
    assert not list(tmp_path.glob("*.tmp"))
