"""Runs whose checkpoints are in object storage, against a real server of the S3 protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import MICRO, assert_same_checkpoint, checkpoint, run, written
from tests.s3 import environment, fetch


def go(save: str, metrics: Path, flags: str, processes: int = 1) -> None:
    more = {"environment": environment()} if processes > 1 else {}
    run(f"{MICRO} --save {save} --load {save} --metrics-file {metrics} {flags}", processes, **more)


@pytest.mark.parametrize(("processes", "flags"), [(1, ""), (2, "--async-save --use-distributed-optimizer")])
def test_a_run_saved_in_object_storage_is_the_run_saved_on_the_disk_and_resumes_like_it(
    bucket: str, tmp_path: Path, processes: int, flags: str
) -> None:
    address, flags = f"{bucket}/same{processes}", f"--bf16 --train-iters 4 --save-interval 2 {flags}"
    go(str(tmp_path / "disk"), tmp_path / "disk.jsonl", flags, processes)
    go(address, tmp_path / "store.jsonl", f"{flags} --exit-interval 2", processes)
    go(address, tmp_path / "store.jsonl", flags, processes)
    assert written(tmp_path / "store.jsonl") == written(tmp_path / "disk.jsonl")
    here = fetch(address, tmp_path / "fetched")
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in (tmp_path / "disk").iterdir())
    for iteration in (2, 4):
        assert_same_checkpoint(checkpoint(here, iteration), checkpoint(tmp_path / "disk", iteration))
