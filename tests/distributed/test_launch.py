"""What a process takes from its environment, and how it tells of a failure."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import LayoutConfig
from megalite.distributed import launch
from megalite.distributed.launch import Environment, choose_device, read_environment
from megalite.distributed.mesh import Mesh


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_on_gpus_a_missing_local_rank_is_refused_with_the_line_that_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    environment = read_environment()
    with pytest.raises(FlagError, match=r"export LOCAL_RANK=\$SLURM_LOCALID"):
        choose_device("auto", environment)
    assert choose_device("cpu", environment).type == "cpu"
    assert not environment.speaks_for_machine  # rank 0 does, since all would say the same
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto", read_environment()) == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_gpus")
def test_a_local_rank_beyond_the_gpus_is_refused() -> None:
    with pytest.raises(FlagError, match="LOCAL_RANK=2 must be below 2"):
        choose_device("cuda", Environment(rank=2, world_size=4, local_rank=2))


def test_tasks_of_srun_that_see_one_gpu_each_are_told_the_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    monkeypatch.setattr(os, "environ", task | {"SLURM_TASKS_PER_NODE": "2"})
    with pytest.raises(FlagError, match="2 processes on this machine .* export LOCAL_RANK=0"):
        choose_device("cuda", read_environment())
    os.environ["LOCAL_RANK"] = "0"
    assert choose_device("cuda", read_environment()) == torch.device("cuda", 0)


@pytest.mark.usefixtures("two_gpus")
def test_one_process_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert choose_device("auto", read_environment()) == torch.device("cuda", 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert choose_device("auto", read_environment()) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"), ({"WORLD_SIZE": "2"}, "RANK is None")],
)
def test_an_environment_that_makes_no_sense_is_named(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(FlagError, match=words):
        read_environment()


def test_several_processes_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(UserError, match="WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT: start with torchrun"),
        launch.start(LayoutConfig(), Environment(world_size=2), torch.device("cpu")),
    ):
        pass


def test_torchruns_own_report_ends_with_our_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(record))
    launch.tell_failure("error: --lr -1 must not be negative\n--seq-length 0 must be at least 1")
    assert json.loads(record.read_text())["message"]["message"].startswith("error: --lr -1")
    report = str(ChildFailedError("pretrain_gpt.py", {0: ProcessFailure(0, 123, 2, str(record))}))
    last = [line.strip() for line in report.splitlines() if line.strip(" =")][-2:]
    assert last == ["traceback : error: --lr -1 must not be negative", "--seq-length 0 must be at least 1"]


@pytest.mark.parametrize(("attempt", "lines"), [(0, ["error: mine"]), (1, ["error: mine"]), (2, [])])
def test_the_failure_of_an_attempt_that_torchrun_repeats_is_on_stderr(
    attempt: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun shows the record of the last one alone."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    launch.tell_failure("error: mine")
    assert capsys.readouterr().err.splitlines() == lines
    assert (tmp_path / "error.json").exists()


def test_a_failure_that_torchruns_record_cannot_take_is_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    launch.tell_failure("error: mine")
    assert capsys.readouterr().err == "error: mine\n"


def test_making_the_process_groups_is_bounded_by_its_flag_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It includes CUDA contexts and the first communicator, which the bound of the meeting would cut off."""
    exits: list[int] = []
    bounds: list[timedelta] = []

    def slow(*_: object, timeout: timedelta, **__: object) -> None:
        bounds.append(timeout)
        time.sleep(0.2)

    monkeypatch.setattr(launch, "RENDEZVOUS_SECONDS", 0.01)
    monkeypatch.setattr(launch, "_meet", lambda *_: (dist.HashStore(), {}))
    monkeypatch.setattr(launch, "_exit", exits.append)
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", slow)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(Mesh, "create", slow)
    with launch.start(LayoutConfig(distributed_timeout_minutes=3), Environment(world_size=2), torch.device("cpu")):
        pass
    assert exits == [] and bounds == [timedelta(minutes=3)] * 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's kernel")
def test_a_worker_ends_when_its_launcher_is_killed() -> None:
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        if os.fork() == 0:
            launch.end_with_launcher()
            os.write(writing, b"x")
        time.sleep(100)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    ready, _, _ = select.select([reading], [], [], 30)  # the worker held the other end
    assert ready and os.read(reading, 1) == b""
    os.close(reading)
