"""Tensor, sequence and pipeline parallelism as whole programs: what `tests/verify` does not prove of them.

One process is the truth, bit by bit where no sum is taken in another order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megalite.pipeline.timeline import read_steps
from tests.e2e.runs import (
    MICRO,
    assert_same_checkpoint,
    checkpoint,
    checkpoint_tensors,
    evaluations,
    largest_difference,
    run,
    written,
)

TP2, PP2 = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
SP = "--sequence-parallel "
VPP2 = "--num-virtual-stages-per-pipeline-rank 2 "
GPIPE, ONE_F_ONE_B, ZB = (f"--pipeline-schedule {name} " for name in ("gpipe", "1f1b", "zb-h1"))


# -------------------------------------------------------------------------------------------------------- bit by bit


@pytest.mark.parametrize(
    ("precision", "schedules"),
    [pytest.param("", [ONE_F_ONE_B, VPP2], id="fp32"), pytest.param("--bf16", [GPIPE, ZB], id="bf16")],
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


@pytest.mark.parametrize(
    ("layout", "processes", "kinds"),
    [
        pytest.param(
            "",
            1,
            [
                "--recompute-activations",
                "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
                "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            ],
            id="one process",
        ),
        pytest.param(
            TP2 + SP + PP2 + ZB,
            4,
            ["--recompute-granularity selective --recompute-modules core_attn mlp layernorm"],
            id="TP 2, SP, PP 2, zb-h1",
            marks=pytest.mark.slow,  # the matrix proves it to 1e-10
        ),
    ],
)
def test_recompute_changes_no_bit(layout: str, processes: int, kinds: list[str], tmp_path: Path) -> None:
    flags = f"{MICRO} {layout} --num-layers 4 --save-interval 100 --train-iters 2"
    for number, kind in enumerate(["", *kinds]):
        folder = tmp_path / str(number)
        run(f"{flags} {kind} --save {folder} --metrics-file {folder}/m.jsonl", processes)
        assert written(folder / "m.jsonl") == written(tmp_path / "0" / "m.jsonl"), kind
        assert_same_checkpoint(checkpoint(folder, 2), checkpoint(tmp_path / "0", 2))


# ------------------------------------------------------------------------------------------------------- checkpoints


def finite(path: Path) -> Path:
    """A copy without the steps that were skipped."""
    lines = path.read_text().splitlines(keepends=True)
    kept = path.with_suffix(".finite")
    kept.write_text("".join(line for line in lines if '"skipped": true' not in line))
    return kept


def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    """Written at TP 2 x PP 2 after 2 steps. The third is skipped, which changes no tensor: what is saved after it is
    what was loaded."""
    flags = f"{MICRO} --num-layers 4 --fp64 --nan-action skip --train-iters 4"
    straight = tmp_path / "straight.jsonl"
    run(f"{flags} --metrics-file {straight}", fault="nan-gradient:0:3")
    source = tmp_path / "source"
    saving = f"--save {source} --save-interval 2 --exit-interval 2 --metrics-file {tmp_path}/a.jsonl"
    run(f"{flags} {TP2 + PP2} {saving}", 4)
    before = checkpoint_tensors(checkpoint(source, 2))
    for name, layout, processes in (("one", "", 1), ("interleaved", PP2 + VPP2, 2), ("TP", TP2 + SP, 2)):
        folder = tmp_path / name
        metrics = folder / "m.jsonl"
        folder.mkdir()
        metrics.write_text((tmp_path / "a.jsonl").read_text())
        saving = f"--load {source} --save {folder} --save-interval 3 --metrics-file {metrics}"
        run(f"{flags} {layout} {saving}", processes, fault="nan-gradient:0:1")
        after = checkpoint_tensors(checkpoint(folder, 3))
        assert after.keys() == before.keys()
        assert [key for key, tensor in after.items() if not tensor.equal(before[key])] == []
        assert len(written(finite(metrics))) == 3
        assert largest_difference(finite(metrics), finite(straight)) <= 1e-10


# ---------------------------------------------------------------------------------------------------------- timeline


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
