"""A run of many steps needs no more files, threads, processes or memory at its end than near its beginning."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.data.token_files import random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, NEEDS_PROC, evaluations, run, steps, written

PIPELINE = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def usage() -> dict[str, int]:
    """This process's open files, threads, children and resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def measured(flags: str, interval: int, processes: int = 1) -> list[dict[str, int]]:
    """What the first process of a run used, after each `interval` steps."""
    flags = f"{flags} --log-interval 50 --num-workers 1"
    lines = run(flags, processes, fault=f"measure:0:{interval}").out.splitlines()
    return [json.loads(line.removeprefix("measured ")) for line in lines if line.startswith("measured ")]


def assert_level(usages: list[dict[str, int]], begin: int, growth_in_bytes: float) -> None:
    """Nothing is more at the end than at measurement `begin`, when all that is made once has been made."""
    early, late = usages[begin], usages[-1]
    for name in ("files", "threads", "python threads", "children"):
        assert late[name] <= early[name], f"{name}: {[usage[name] for usage in usages]}"
    assert late["bytes"] < early["bytes"] + growth_in_bytes, [usage["bytes"] for usage in usages]


@pytest.mark.slow
@NEEDS_PROC
def test_sixty_steps_with_evaluations_and_saves_leak_nothing_and_a_pipeline_keeps_step(tmp_path: Path) -> None:
    """Untied, a pipeline computes bit for bit what one process computes."""
    for name, layout, processes in (("one", "", 1), ("two", PIPELINE, 2)):
        folder = tmp_path / name
        usages = measured(
            f"{MICRO} --num-layers 4 --untie-embeddings-and-output-weights {layout} --train-iters 60 "
            f"--eval-interval 10 --eval-iters 1 --save {folder}/c --save-interval 20 --keep-last-checkpoints 2 "
            f"--metrics-file {folder}/m.jsonl --tensorboard-dir {folder}/tb --timeline {folder}/t",
            10,
            processes,
        )
        assert len(steps(folder / "m.jsonl")) == 60 and len(usages) == 6
        assert_level(usages, 2, 30e6)
        assert len(list((folder / "c").glob("iter_*"))) == 2
    one, two = tmp_path / "one" / "m.jsonl", tmp_path / "two" / "m.jsonl"
    assert written(two) == written(one)
    assert evaluations(two, exact=True) == evaluations(one, exact=True)


@NEEDS_PROC
def test_whole_validations_leak_nothing(tmp_path: Path) -> None:
    """Each reads its split with a loader of its own."""
    prefix = write_tokens(tmp_path / "d", random_documents(20, low=10, high=40))
    paths = f"--train-data-path {prefix} --valid-data-path {prefix} --vocab-size 130"
    flags = f"{MICRO.replace(MOCK, '')} {paths} --full-validation --eval-iters 1 --eval-interval 2"
    usages = measured(f"{flags} --train-iters 16", 2)
    assert len(usages) == 8
    assert_level(usages, 2, 30e6)
