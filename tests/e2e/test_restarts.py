"""A run goes on by itself on what is left: torchrun starts it again, and it loads its own newest checkpoint."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import (
    MICRO,
    NEEDS_PROC,
    TOLERANCE,
    Program,
    assert_same_checkpoint,
    checkpoint,
    largest_difference,
    newest,
    run,
    wait_for,
    written,
)
from tests.e2e.test_failures import free_port


def flags(folder: Path, iterations: int, interval: int) -> str:
    return (
        f"{MICRO} --train-iters {iterations} --save {folder} --load {folder} --save-interval {interval} "
        f"--metrics-file {folder}/m.jsonl"
    )


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_is_killed_at_its_newest_checkpoint(tmp_path: Path) -> None:
    """Rank 1 is killed in the fourth step of each of two lives."""
    started = Program(flags(tmp_path / "a", 9, 3), 2, fault="kill:1:4", elastic="--max-restarts 2")
    outcome = started.wait()
    assert outcome.code == 0, str(outcome)
    assert [f"iteration {n}\n" in outcome.out for n in (3, 6)] == [True, True]
    run(flags(tmp_path / "b", 9, 3), 2)
    assert written(tmp_path / "a" / "m.jsonl") == written(tmp_path / "b" / "m.jsonl")
    assert_same_checkpoint(checkpoint(tmp_path / "a", 9), checkpoint(tmp_path / "b", 9))


@NEEDS_PROC
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_goes_on_without_a_killed_agent_and_with_it_when_it_returns(tmp_path: Path) -> None:
    """Two agents with two processes each: DP 2, then 1, then 2, and the losses of one process that nobody disturbed."""
    same = "--fp64 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 "
    place = f"--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-id a --rdzv-endpoint 127.0.0.1:{free_port()} "
    conf = "--rdzv-conf last_call_timeout=3,join_timeout=120,keep_alive_interval=1,is_host="

    def agent(host: int) -> Program:
        return Program(
            f"{flags(tmp_path / 'a', 150, 10)} {same} --tensor-model-parallel-size 2",
            2,
            fault="slow:0:100",  # so that it doesn't end before the agent is back
            elastic=f"{place} {conf}{host}",
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    def reached(iteration: int) -> bool:
        return (tmp_path / "a" / "latest_checkpointed_iteration.txt").exists() and newest(tmp_path / "a") >= iteration

    first, second = agent(1), agent(0)
    agents = [first, second]
    try:
        wait_for(lambda: reached(10), 120)
        os.kill(second.pids[0], signal.SIGKILL)
        assert second.remaining(10) == []  # its workers end with it
        alone = newest(tmp_path / "a")
        wait_for(lambda: reached(alone + 20), 120)
        agents.append(agent(0))
        outcome, returned = first.wait(240), agents[-1].wait(60)
        lost = second.wait(10)
    finally:
        for each in agents:
            each.kill()
    assert (outcome.code, returned.code) == (0, 0), f"{outcome}\n{returned}"
    sizes = re.findall(r"layout: .* x DP (\d) x", lost.out + outcome.out + returned.out)
    assert sorted(sizes) == ["1", "2", "2"]
    run(f"{flags(tmp_path / 'b', 150, 150)} {same}")
    assert largest_difference(tmp_path / "a" / "m.jsonl", tmp_path / "b" / "m.jsonl") <= TOLERANCE
