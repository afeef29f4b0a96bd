"""A process that srun started knows its place without torchrun. The values are those of a real srun."""

from __future__ import annotations

import os

import pytest

from megalite.distributed.launch import Environment, launch_variables, read_environment
from megalite.distributed.slurm import PORTS, as_torchrun, first_node

# The last of the tasks of `srun --nodes 2 --ntasks 3`.
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def test_a_task_of_srun_has_all_that_torchrun_would_say() -> None:
    assert as_torchrun(SRUN) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n2",
        "MASTER_PORT": "18456",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("gpu[007-009,12],big1", "gpu007"),
        ("a-b,c[1-3]", "a-b"),
        ("login,gpu[1-2]", "login"),
        ("rack[1-2]n[03-04],x", "rack1n03"),
    ],
)
def test_the_first_node_is_that_of_scontrol_show_hostnames(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(("node", "tasks"), [("0", "2"), ("2", "2"), ("3", "1"), ("4", "12"), ("5", None), ("", None)])
def test_the_tasks_of_a_node_are_counted_in_slurms_short_form(node: str, tasks: str | None) -> None:
    found = as_torchrun(SRUN | {"SLURM_TASKS_PER_NODE": "2(x3),1,12", "SLURM_NODEID": node})
    assert found.get("LOCAL_WORLD_SIZE") == tasks


def test_all_jobs_have_a_port_that_linux_gives_to_no_connection() -> None:
    ports = {int(as_torchrun(SRUN | {"SLURM_JOB_ID": str(job)})["MASTER_PORT"]) for job in range(60_000, 70_000)}
    assert ports == set(PORTS) and max(ports) < 32768


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_NTASKS"])
def test_a_shell_in_an_allocation_is_one_process(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: value for name, value in SRUN.items() if name != missing})
    assert read_environment() == Environment()


@pytest.mark.parametrize(
    ("set_by_hand", "expected"),
    [
        ({}, Environment(2, 3, 0, 1)),
        ({"SLURM_TASKS_PER_NODE": "1,2"}, Environment(2, 3, 0, 2)),
        ({"SLURM_TASKS_PER_NODE": "1,2", "LOCAL_RANK": "0"}, Environment(2, 3, 0, 1)),  # sees one GPU
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, Environment(2, 3, 3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Environment(1, 2, local_rank_is_known=False)),  # as torchrun's workers
    ],
)
def test_what_is_set_wins_over_srun(
    set_by_hand: dict[str, str], expected: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", SRUN | set_by_hand)
    assert read_environment() == expected


def test_a_meeting_place_that_is_set_wins_over_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", SRUN | {"MASTER_ADDR": "10.0.0.1"})
    assert [launch_variables()[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == ["10.0.0.1", "18456"]
