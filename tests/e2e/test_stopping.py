"""How long a run is, and how it ends early: ramp-up, samples, intervals, time, signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import (
    MICRO,
    Forked,
    Program,
    Started,
    assert_same_checkpoint,
    checkpoint,
    newest,
    run,
    steps,
    training_state,
    wait_for,
    written,
)


def test_a_batch_ramp_counts_real_samples(tmp_path: Path) -> None:
    """From 4 to 12 by 4 over 40 samples: growths after 20 and 40 of them, at the next step that begins."""
    metrics = tmp_path / "m.jsonl"
    ramp = "--rampup-batch-size 4 4 40 --global-batch-size 12 --lr-decay-style linear --train-iters 10"
    run(f"{MICRO} {ramp} --metrics-file {metrics}")
    sizes = [4] * 5 + [8] * 3 + [12] * 2
    recorded = steps(metrics)
    assert [step["global_batch_size"] for step in recorded] == sizes
    consumed = [sum(sizes[: k + 1]) for k in range(10)]
    assert [step["consumed_samples"] for step in recorded] == consumed
    total = sum(sizes)
    expected = [1e-3 * (1 - before / total) for before in [0, *consumed[:-1]]]
    assert [step["learning_rate"] for step in recorded] == pytest.approx(expected, rel=1e-12)


def test_train_samples_gives_the_length(tmp_path: Path) -> None:
    """25 samples are 6 whole steps of 4."""
    metrics = tmp_path / "m.jsonl"
    flags = MICRO.replace("--train-iters 10", "--train-samples 25")
    run(f"{flags} --lr-decay-style linear --metrics-file {metrics}")
    recorded = steps(metrics)
    assert [step["consumed_samples"] for step in recorded] == [4, 8, 12, 16, 20, 24]
    assert recorded[-1]["learning_rate"] == pytest.approx(1e-3 * (1 - 20 / 25), rel=1e-12)


def test_exit_interval_saves_and_exits_with_0(tmp_path: Path) -> None:
    flags = f"{MICRO} --exit-interval 3 --save {tmp_path} --save-interval 2 --metrics-file {tmp_path}/m.jsonl"
    outcome = run(flags)
    assert outcome.code == 0
    assert newest(tmp_path) == 3 and checkpoint(tmp_path, 2).is_dir()
    assert len(steps(tmp_path / "m.jsonl")) == 3
    assert "--exit-interval 3" in outcome.out


def test_exit_duration_saves_after_the_step_and_exits_with_0_on_all_ranks(tmp_path: Path) -> None:
    outcome = run(f"{MICRO} --exit-duration-in-mins 1e-9 --save {tmp_path} --save-interval 100", 2)
    assert outcome.codes == (0, 0)
    assert newest(tmp_path) == 1
    assert outcome.out.count("--exit-duration-in-mins") == 1


def interrupt(started: Started, metrics: Path, number: signal.Signals, *, everyone: bool = False) -> None:
    """Send a signal to a long run in the middle of its steps; with `everyone` also to its data-loader workers, as
    systemd does."""
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, 90)
        for pid in started.members() if everyone else started.pids:
            os.kill(pid, number)
    except BaseException:
        started.kill()
        raise


LONG = f"{MICRO} --train-iters 100000 --exit-signal-handler --save-interval 100000 "


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        pytest.param(signal.SIGTERM, 2, id="SIGTERM to all, with workers"),
        pytest.param(signal.SIGINT, 0, id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_and_saves_and_a_resume_continues_bitwise(
    number: signal.Signals, workers: int, tmp_path: Path
) -> None:
    flags = f"{LONG} --num-workers {workers} "
    metrics = tmp_path / "b.jsonl"
    first = f"{flags} --save {tmp_path}/b --metrics-file {metrics}"
    started = Forked(first)
    interrupt(started, metrics, number, everyone=workers > 0)
    outcome = started.wait()
    assert outcome.code == 0, str(outcome)
    assert started.remaining(10) == []
    done = len(steps(metrics))
    assert newest(tmp_path / "b") == done >= 3
    assert number.name in outcome.out + outcome.err and "Traceback" not in outcome.err

    end = f"--exit-interval {done + 4}"
    run(f"{first} --load {tmp_path}/b {end}")
    run(f"{flags} --save {tmp_path}/a --metrics-file {tmp_path}/a.jsonl {end}")
    assert written(metrics) == written(tmp_path / "a.jsonl")
    assert_same_checkpoint(checkpoint(tmp_path / "b", done + 4), checkpoint(tmp_path / "a", done + 4))


@pytest.mark.parametrize("start", [Forked, pytest.param(Program, id="torchrun", marks=pytest.mark.slow)])
def test_sigterm_stops_all_ranks_at_one_step_and_saves(start: type[Forked | Program], tmp_path: Path) -> None:
    """torchrun passes it on to every rank."""
    metrics = tmp_path / "m.jsonl"
    started = start(f"{LONG} --save {tmp_path}/c --metrics-file {metrics}", 2)
    interrupt(started, metrics, signal.SIGTERM)
    outcome = started.wait()
    assert started.remaining(10) == []
    done = len(steps(metrics))
    assert newest(tmp_path / "c") == done >= 3
    assert training_state(checkpoint(tmp_path / "c", done))["training"]["iteration"] == done
    assert "SIGTERM: finishing this step" in outcome.err
    assert "exiting at iteration" in outcome.out


def test_an_interrupt_without_the_handler_ends_at_once_with_one_line(tmp_path: Path) -> None:
    flags = f"{MICRO} --train-iters 100000 --num-workers 2 --metrics-file {tmp_path}/m.jsonl"
    started = Forked(flags)
    interrupt(started, tmp_path / "m.jsonl", signal.SIGINT)
    outcome = started.wait(30)
    assert outcome.code == 130
    assert outcome.err.strip() == "interrupted"
    assert started.remaining(15) == []
