"""What the examples for clusters start, and when: scripts, manifests, the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megalite.config.flags import build_parser, parse_namespace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
TRACKER = "latest_checkpointed_iteration.txt"


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# -------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize(
    ("before", "after", "code", "requeued"),
    [
        (None, 100, 0, False),  # trained to its end
        (40, 100, 0, False),
        (100, 100, 0, False),
        (40, 60, 0, True),  # saved before preemption or the time limit
        (None, None, 0, True),  # told to stop before its first step
        (40, 40, 143, True),  # ended by SIGTERM while it started
        (40, 60, 1, True),  # failed after it had saved
        (40, 40, 1, False),  # fails every time
        (None, None, 2, False),  # bad flags
    ],
)
def test_a_job_queues_again_unless_it_is_done_or_gets_nowhere(
    before: int | None, after: int | None, code: int, requeued: bool, tmp_path: Path
) -> None:
    save = tmp_path / "checkpoints" / "name"
    save.mkdir(parents=True)
    if before is not None:
        (save / TRACKER).write_text(str(before))
    step = f"echo {after} > {save / TRACKER}" if after is not None else ":"
    executable(tmp_path / "srun", f"{step}\nexit {code}")
    executable(tmp_path / "scontrol", f'echo "$@" > {tmp_path / "called"}')
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm" / "pretrain.sbatch"), "--lr", "1"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_NAME": "name",
            "SLURM_JOB_ID": "7",
            "ITERATIONS": "100",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    called = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else None
    assert called == ("requeue 7\n" if requeued else None), done.stdout


# ------------------------------------------------------------------------------------------------------ several hosts


def torchrun_starts(words: list[str]) -> tuple[Any, list[str]]:
    """What torchrun understands, and the flags that it passes on; those are flags of pretrain_gpt.py."""
    options = get_args_parser().parse_args(words)
    assert Path(options.training_script).name == "pretrain_gpt.py"
    parse_namespace(build_parser("pretrain_gpt.py", "d"), options.training_script_args)
    return options, options.training_script_args


def test_each_host_starts_the_same_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    executable(
        tmp_path / "python",
        f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nprintf "%s\\n" "$@" > {tmp_path / "words"}',
    )
    command = ["sh", "examples/multinode.sh", "1:4", "127.0.0.1", "@examples/tiny.args", "--seed", "1"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "PROCESSES": "2", "PORT": "29501"}
    subprocess.run(command, env=environment, check=True)
    module, *words = (tmp_path / "words").read_text().splitlines()
    assert (module, words[0]) == ("-m", "torch.distributed.run")
    options, flags = torchrun_starts(words[1:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("1:4", "2", "127.0.0.1:29501")
    assert (options.local_addr, options.rdzv_conf) == ("127.0.0.1", "")
    assert flags == ["@examples/tiny.args", "--seed", "1"]


def test_too_few_words_are_told_the_usage() -> None:
    done = subprocess.run(["sh", EXAMPLES / "multinode.sh", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


# --------------------------------------------------------------------------------------------------------- Kubernetes


def manifests(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / name).read_text())}


def pods() -> dict[str, tuple[dict[str, Any], list[str]]]:
    """The pod of each kind of job, and its command."""
    trainer, older = manifests("trainjob.yaml"), manifests("pytorchjob.yaml")["PyTorchJob"]["spec"]
    runtime, job = trainer["TrainingRuntime"], trainer["TrainJob"]["spec"]
    assert job["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].split("/")[0],
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == pod["containers"][0]["name"] == "node"  # the names that the trainer looks for
    both = {"TrainJob": (pod, job["trainer"]["command"])}
    for role, replicas in older["pytorchReplicaSpecs"].items():
        pod = replicas["template"]["spec"]
        assert pod["containers"][0]["name"] == "pytorch"
        both[role] = (pod, pod["containers"][0]["command"])
    return both


def test_the_pods_start_torchrun_with_our_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for kind, (pod, (program, *words)) in pods().items():
        assert program == "torchrun"
        options, flags = torchrun_starts(words)
        if "--exit-signal-handler" in flags:  # torchrun's end comes before the kubelet's
            assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"], kind


def test_the_pods_mount_volumes_that_exist() -> None:
    claim = manifests("storage.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
    for kind, (pod, _) in pods().items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes.keys(), kind
        assert volumes["storage"]["persistentVolumeClaim"] == {"claimName": claim}, kind


# -------------------------------------------------------------------------------------------------------------- image


def test_the_image_copies_files_that_exist_and_installs_the_locked_versions() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE)
    assert copies[-1] == "."
    assert all((ROOT / source).exists() for sources in copies for source in sources.split())
    installs = re.findall(r"pip install .*", text)
    assert installs and all("-c requirements.lock" in install for install in installs)
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"megalite", "examples", "tools", "docs", "tests", "benchmarks"} & set(left_out)
