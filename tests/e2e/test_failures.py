"""A run fails as one: with one message or one traceback, the right exit code, in time, and nothing left running."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megalite.distributed.launch import RENDEZVOUS_SECONDS
from tests.e2e.runs import (
    MICRO,
    Outcome,
    Program,
    newest,
    refusal,
    run,
    steps,
    written,
)

WITHIN = 60  # seconds, the promise
CHUNKS = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"


def tracebacks(outcome: Outcome) -> int:
    """Tracebacks of ranks. torchrun adds one of its own, which doesn't come by here."""
    return (outcome.out + outcome.err).count("in run_worker")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ------------------------------------------------------------------------------------------------------ flag mistakes


def test_three_ranks_and_a_layout_of_two_name_both_numbers() -> None:
    outcome = run(f"{MICRO} --tensor-model-parallel-size 2", 3, check=False)
    assert outcome.codes == (2, 2, 2)
    assert outcome.err.count("error:") == 1
    assert "--tensor-model-parallel-size 2" in outcome.err and "world size 3" in outcome.err


@pytest.mark.parametrize(
    ("flags", "processes", "words"),
    [
        pytest.param("--device cuda:9", 1, ["--device", "cuda:9"], id="device"),
        pytest.param("--attention-backend flash", 1, ["--attention-backend flash"], id="no such kernel here"),
        pytest.param(f"{CHUNKS} --global-batch-size 6", 2, ["size 6 is 3 microbatches", "2 stages"], id="microbatches"),
        pytest.param(
            f"{CHUNKS} --global-batch-size 8 --rampup-batch-size 2 2 100",
            2,
            ["global batch size 2 is 1 microbatches", "global batch size 6 is 3 microbatches", "2 stages"],
            id="microbatches while the batch grows",
        ),
    ],
)
def test_what_this_machine_or_the_schedule_cannot_do_is_refused_as_flags_are(
    flags: str, processes: int, words: list[str]
) -> None:
    message = refusal(f"{MICRO} {flags}", processes)
    assert all(word in message for word in words), message


@pytest.mark.slow
def test_under_torchrun_a_flag_mistake_is_told_once() -> None:
    started = Program(f"{MICRO} --global-batch-size 5", 2)
    outcome = started.wait()
    assert outcome.code != 0
    assert (outcome.out + outcome.err).count("--global-batch-size 5") == 1
    assert "exitcode  : 2" in outcome.err
    assert outcome.err.rstrip(" =\n").splitlines()[-1].startswith("  traceback : error: --global-batch-size 5")
    assert tracebacks(outcome) == 0
    assert started.remaining(10) == []


# ------------------------------------------------------------------------------------------------- one rank's failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("forward:1:3", "forward failed on purpose", id="forward"),
        pytest.param("kill:1:3", None, id="killed"),
    ],
)
def test_under_torchrun_the_failure_of_one_rank_ends_all(fault: str, message: str | None, tmp_path: Path) -> None:
    flags = f"{MICRO} --num-workers 1 --train-iters 1000 --metrics-file {tmp_path}/m.jsonl"
    started = Program(flags, 2, fault=fault)
    outcome = started.wait(WITHIN)
    assert outcome.code != 0, str(outcome)
    assert started.remaining(15) == []
    assert len(steps(tmp_path / "m.jsonl")) < 20
    if message is None:
        assert tracebacks(outcome) == 0 and "SIGKILL" in outcome.err
    else:
        assert tracebacks(outcome) == 1, str(outcome)
        assert f"Fault: {message}\n" in outcome.err


@pytest.mark.parametrize(
    ("flags", "failing", "fault"),
    [
        pytest.param("--num-workers 1", 1, "data:1:3", id="data", marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2", 1, "forward:1:3", id="TP 2", marks=pytest.mark.slow),
        pytest.param(
            "--pipeline-model-parallel-size 2",
            0,
            "backward:0:3",
            id="first stage, whose messages end",
            marks=pytest.mark.slow,
        ),
        pytest.param("--pipeline-model-parallel-size 2", 1, "forward:1:3", id="last stage, whose messages end"),
    ],
)
def test_without_torchrun_the_failure_of_one_rank_ends_all(flags: str, failing: int, fault: str) -> None:
    outcome = run(f"{MICRO} --train-iters 1000 {flags}", 2, fault=fault, timeout=WITHIN, check=False)
    assert outcome.codes == (1, 1)
    assert tracebacks(outcome) == 1, str(outcome)
    assert "on purpose" in outcome.err
    assert f"rank {1 - failing}: stopped, because another rank failed" in outcome.err


def test_a_killed_rank_ends_the_other_without_torchrun_too() -> None:
    outcome = run(f"{MICRO} --train-iters 1000", 2, fault="kill:1:3", timeout=WITHIN, check=False)
    assert outcome.codes == (1, -9)
    assert tracebacks(outcome) == 0
    assert "rank 0: stopped, because another rank failed" in outcome.err


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_waits_where_no_connection_shows_a_death_ends_too(dead: int) -> None:
    """As under NCCL, whose kernels wait on the device."""
    fault = f"kill:{dead}:2,sleep:{1 - dead}:2"
    outcome = run(f"{MICRO} --train-iters 1000", 2, fault=fault, timeout=WITHIN, check=False)
    assert outcome.codes[1 - dead] == 1 and outcome.codes[dead] == -9
    assert outcome.err.strip() == f"rank {1 - dead}: stopped, because another rank failed (rank {dead} ended)"


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_dies_while_starting_ends_the_other_with_one_message(dead: int) -> None:
    outcome = run(MICRO, 2, fault=f"starting:{dead}:0", timeout=WITHIN, check=False)
    assert outcome.codes[1 - dead] == 1 and outcome.codes[dead] == -9
    assert outcome.err.strip() == f"rank {1 - dead}: stopped, because another rank failed (rank {dead} ended)"


def test_a_single_process_shows_its_traceback_once() -> None:
    outcome = run(f"{MICRO} --num-workers 2 --train-iters 1000", fault="data:0:3", check=False)
    assert outcome.code == 1
    assert tracebacks(outcome) == 1 and "Fault: reading failed on purpose" in outcome.err


def test_a_rank_that_fails_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    flags = f"{MICRO} --train-iters 4 --save {tmp_path} --save-interval 2 --metrics-file {tmp_path}/m.jsonl"
    outcome = run(flags, 2, fault="save:1:2", timeout=WITHIN, check=False)
    assert outcome.codes == (1, 1)
    assert tracebacks(outcome) == 1 and "saving failed on purpose" in outcome.err
    assert newest(tmp_path) == 2
    run(f"{flags} --load {tmp_path}", 2)
    assert newest(tmp_path) == 4
    assert [iteration for iteration, *_ in written(tmp_path / "m.jsonl")] == [str(k) for k in range(1, 5)]
    assert not list(tmp_path.glob("*.tmp"))


# ------------------------------------------------------------------------------------------------------------- launch


@pytest.mark.slow
def test_two_runs_at_once_on_one_machine_both_work(tmp_path: Path) -> None:
    started = [Program(f"{MICRO} --train-iters 2 --metrics-file {tmp_path}/{name}.jsonl", 2) for name in "ab"]
    for each in started:
        outcome = each.wait()
        assert outcome.code == 0, str(outcome)
    assert written(tmp_path / "a.jsonl") == written(tmp_path / "b.jsonl")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outcome = run(MICRO, environment=place, check=False, timeout=WITHIN)
    assert outcome.code == 1
    assert outcome.err.count("error:") == 1 and f"MASTER_PORT={port}" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_rank_whose_others_never_come_gives_up_within_a_minute() -> None:
    assert RENDEZVOUS_SECONDS < WITHIN
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outcome = run(MICRO, fault="rendezvous:0:2", environment=place, check=False, timeout=WITHIN)
    assert outcome.code == 1
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err
    assert all(word in outcome.err for word in ("WORLD_SIZE=2", "MASTER_PORT=", "within 2 s", "torchrun"))
