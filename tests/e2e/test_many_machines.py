"""Runs whose processes start without one torchrun over all of them: by srun, or by a torchrun on each machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.distributed.slurm import PORTS
from tests.e2e.runs import MICRO, ROOT, Forked, assert_equal, outputs, run

FLAGS = f"{MICRO} --fp64 --train-iters 4"


def free_port() -> int:
    """One of those that jobs of Slurm meet at, which nobody uses now."""
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) != 0:
                return port
    raise AssertionError("no port is free")


def test_srun_without_torchrun_computes_what_one_process_computes(tmp_path: Path) -> None:
    """Two tasks that have srun's variables alone, on two nodes that are this machine."""
    job = {
        "SLURM_JOB_ID": str(free_port() - PORTS[0]),
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    run(f"{FLAGS} {outputs(tmp_path / 'one')}")
    tasks = [
        Forked(f"{FLAGS} {outputs(tmp_path / 'two')}", environment=job | {"SLURM_PROCID": rank, "SLURM_NODEID": rank})
        for rank in ("0", "1")
    ]
    outcomes = [task.wait() for task in tasks]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "DP 2" in outcomes[0].out and "DP 2" not in outcomes[1].out
    assert_equal(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_torchrun_on_each_host_computes_what_one_process_computes(tmp_path: Path) -> None:
    """Two agents on this machine; they meet as two hosts would."""
    run(f"{FLAGS} {outputs(tmp_path / 'one')}")
    settings = {"PYTHON": sys.executable, "PROCESSES": "1", "PORT": str(free_port()), "RESTARTS": "0"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "SLURM"))}
    flags = f"{FLAGS} {outputs(tmp_path / 'two')}".split()
    command = ["sh", "examples/multinode.sh", "2", "127.0.0.1", *flags]
    hosts = [subprocess.Popen(command, cwd=ROOT, env=inherited | settings) for _ in range(2)]
    try:
        assert [host.wait(100) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.terminate()
    assert_equal(tmp_path / "two", tmp_path / "one")
