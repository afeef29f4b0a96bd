"""What srun told this process, under torchrun's names.

Key idea: `srun python pretrain_gpt.py` starts all processes and gives each its place in variables of its own, so that
nothing else is needed to start a run. Only where they meet doesn't stand there: on the first node, where srun puts task
0, at a port that follows from the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PORTS = range(15000, 25000)
"""Below the ports that Linux gives to connections."""

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def as_torchrun(srun: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, and of LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT what follows from `srun`.

    Empty where that isn't the environment of a task: a shell of salloc, a batch script that doesn't ask for tasks.
    """
    if "SLURM_PROCID" not in srun or "SLURM_NTASKS" not in srun:
        return {}
    found = {
        "RANK": srun["SLURM_PROCID"],
        "WORLD_SIZE": srun["SLURM_NTASKS"],
        "LOCAL_RANK": srun.get("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": _tasks_of_node(srun.get("SLURM_TASKS_PER_NODE", ""), srun.get("SLURM_NODEID", "")),
        "MASTER_ADDR": next((first_node(srun[name]) for name in _NODE_LISTS if name in srun), None),
        "MASTER_PORT": _port(srun.get("SLURM_JOB_ID", "")),
    }
    return {name: value for name, value in found.items() if value is not None}


def first_node(nodes: str) -> str:
    """The first host of Slurm's short form of a list of hosts: `gpu[007-009,12],big1` → `gpu007`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _tasks_of_node(counts: str, node: str) -> str | None:
    """The tasks of the node with this index: `2(x3),1` says two on each of three nodes, and one on the fourth."""
    tasks: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [count] * int(times or 1)
    return tasks[int(node)] if node.isdigit() and int(node) < len(tasks) else None


def _port(job: str) -> str | None:
    return str(PORTS[int(job) % len(PORTS)]) if job.isdigit() else None
