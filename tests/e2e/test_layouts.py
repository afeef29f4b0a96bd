"""Layouts as whole programs: what `tests/verify` does not prove of them.

One process is the truth, bit by bit where no sum is taken in another order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megalite.pipeline.timeline import read_steps
from tests.e2e.runs import MICRO, assert_equal, evaluations, outputs, program, run, written

FLAGS = f"{MICRO} --train-iters 4 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
PP2, VPP2 = "--pipeline-model-parallel-size 2 ", "--num-virtual-stages-per-pipeline-rank 2 "
GPIPE, ONE_F_ONE_B, ZB = (f"--pipeline-schedule {name} " for name in ("gpipe", "1f1b", "zb-h1"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process in float64."""
    folder = tmp_path_factory.mktemp("reference")
    run(f"{FLAGS} --fp64 {outputs(folder)}")
    return folder


@pytest.mark.slow
def test_torchrun_computes_what_one_process_computes(reference: Path, tmp_path: Path) -> None:
    program(f"{FLAGS} --fp64 {outputs(tmp_path)}", 2)
    assert_equal(tmp_path, reference)


def test_the_micro_batch_size_does_not_matter(reference: Path, tmp_path: Path) -> None:
    for size in (1, 8):
        folder = tmp_path / str(size)
        run(f"{FLAGS} --fp64 {outputs(folder)} --micro-batch-size {size}")
        assert_equal(folder, reference)


def test_float32_agrees_to_its_own_precision(tmp_path: Path) -> None:
    for size in (1, 2):
        run(f"{FLAGS} {outputs(tmp_path / str(size))}", size)
    assert_equal(tmp_path / "2", tmp_path / "1", 2e-5)


@pytest.mark.parametrize(
    ("precision", "schedules"),
    [
        pytest.param("", [VPP2], id="fp32"),
        pytest.param("--bf16", [GPIPE, ONE_F_ONE_B, VPP2, ZB], id="bf16", marks=pytest.mark.slow),
    ],
)
def test_pipelines_and_their_evaluations_are_bitwise_those_of_one_process(
    precision: str, schedules: list[str], tmp_path: Path
) -> None:
    """Untied, so that no sum is taken over stages."""
    flags = (
        f"{MICRO} {precision} --num-layers 4 --micro-batch-size 1 --untie-embeddings-and-output-weights "
        "--train-iters 2 --eval-interval 1 --eval-iters 1"
    )
    run(f"{flags} --metrics-file {tmp_path}/one.jsonl")
    assert len(evaluations(tmp_path / "one.jsonl")) == 3
    for number, schedule in enumerate(schedules):
        path = tmp_path / f"{number}.jsonl"
        run(f"{flags} {PP2} {schedule} --metrics-file {path}", 2)
        assert written(path) == written(tmp_path / "one.jsonl"), schedule
        assert evaluations(path, exact=True) == evaluations(tmp_path / "one.jsonl", exact=True), schedule


def test_each_stage_writes_what_it_did(tmp_path: Path) -> None:
    """4 microbatches through 2 chunks on 2 stages; live are 2 (p - r - 1) + (v - 1) p forwards ahead and one more."""
    flags = f"{MICRO} --num-layers 4 --global-batch-size 8 --train-iters 2 --timeline {tmp_path}"
    run(f"{flags} {PP2 + VPP2}", 2)
    recorded = read_steps(tmp_path)
    assert len(recorded) == 2
    for step in recorded:
        assert step.peak_live() == [5, 3]
        for spans in step.ranks:
            counts = Counter(span.action for span in spans if span.action.kind in ("forward", "backward"))
            assert set(counts.values()) == {1} and len(counts) == 2 * 2 * 4
