"""Tensor, sequence and pipeline parallelism as whole programs: one process is the truth, to 1e-10 in float64 where sums
are taken in another order, bit by bit where they aren't."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megalite.pipeline.timeline import read_steps
from tests.e2e.runs import (
    DOCUMENTS,
    DROPOUT,
    LLAMA,
    MICRO,
    T0,
    assert_equal,
    assert_same_checkpoint,
    checkpoint,
    checkpoint_tensors,
    evaluations,
    largest_difference,
    outputs,
    run,
    written,
)

TP2, PP2 = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
SP = "--sequence-parallel "
VPP2 = "--num-virtual-stages-per-pipeline-rank 2 "
HALF = "--micro-batch-size 4 "  # half as many microbatches, and of tensor parallelism's many small messages
GPIPE, ONE_F_ONE_B, ZB = (f"--pipeline-schedule {name} " for name in ("gpipe", "1f1b", "zb-h1"))


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(TP2 + HALF, 2, id="TP 2"),
        pytest.param(TP2 + SP + HALF, 4, id="TP 2, SP, DP 2"),
        pytest.param(f"{PP2} {GPIPE}", 2, id="gpipe"),
        pytest.param(PP2, 2, id="1f1b"),
        pytest.param(PP2 + VPP2, 2, id="interleaved"),
        pytest.param(PP2 + ZB, 2, id="zb-h1"),
        pytest.param(PP2, 4, id="PP 2, DP 2"),
        pytest.param(TP2 + SP + PP2 + HALF, 4, id="TP 2, SP, PP 2"),
    ],
)
def test_a_layout_computes_what_one_process_computes(
    flags: str, processes: int, reference: Path, tmp_path: Path
) -> None:
    run(f"{T0} --fp64 --num-workers 0 {outputs(tmp_path)} {flags}", processes)
    assert_equal(tmp_path, reference)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(TP2 + HALF, 2, id="TP 2"),
        pytest.param(TP2 + SP + HALF, 2, id="TP 2, SP"),
        pytest.param(PP2, 2, id="PP 2"),
        pytest.param(TP2 + SP + PP2 + VPP2 + HALF, 4, id="TP 2, SP, PP 2, VPP 2"),
    ],
)
def test_a_layout_drops_out_what_one_process_drops_out(
    flags: str, processes: int, dropout_reference: Path, tmp_path: Path
) -> None:
    run(f"{T0} {DROPOUT} --fp64 --num-workers 0 {outputs(tmp_path)} {flags}", processes)
    assert_equal(tmp_path, dropout_reference)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(
            "--tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 8",
            4,
            id="TP 4 shares 2 key/value heads",
        ),
        pytest.param(PP2, 4, id="PP 2, DP 2"),
        pytest.param(TP2 + PP2 + ZB + HALF, 4, id="TP 2, PP 2, zb-h1"),
    ],
)
def test_a_layout_trains_a_llama_on_documents_as_one_process_does(
    flags: str, processes: int, llama_reference: Path, tmp_path: Path
) -> None:
    run(f"{T0} {LLAMA} {DROPOUT} {DOCUMENTS} --fp64 --num-workers 0 {outputs(tmp_path)} {flags}", processes)
    assert_equal(tmp_path, llama_reference)


@pytest.mark.parametrize(
    ("layers", "layouts"),
    [
        pytest.param(
            5,
            [
                (f"{PP2} --decoder-first-pipeline-num-layers 2", 2),
                (f"{PP2} --decoder-last-pipeline-num-layers 0", 2),
                (f"{PP2} --account-for-loss-in-pipeline-split", 2),
            ],
            id="5 layers",
        ),
        pytest.param(
            2,
            [
                (
                    "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1 "
                    "--decoder-last-pipeline-num-layers 1",
                    3,
                ),
                (
                    f"{PP2} {VPP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
                    2,
                ),
            ],
            id="stages of no layer",
        ),
    ],
)
def test_uneven_stages_compute_what_one_process_computes(
    layers: int, layouts: list[tuple[str, int]], tmp_path: Path
) -> None:
    flags = f"{MICRO} --fp64 --num-layers {layers}"
    for number, (layout, processes) in enumerate([("", 1), *layouts]):
        run(f"{flags} {layout} {outputs(tmp_path / str(number))}", processes)
        assert_equal(tmp_path / str(number), tmp_path / "0")


# -------------------------------------------------------------------------------------------------------- bit by bit


@pytest.mark.parametrize(
    ("precision", "schedules"),
    [
        pytest.param("", [GPIPE, ONE_F_ONE_B, ZB, VPP2], id="fp32"),
        pytest.param("--bf16", [ZB, VPP2], id="bf16"),
    ],
)
def test_pipelines_and_their_evaluations_are_bitwise_those_of_one_process(
    precision: str, schedules: list[str], tmp_path: Path
) -> None:
    """Untied, so that no sum is taken over stages."""
    flags = (
        f"{MICRO} {precision} --num-layers 4 --micro-batch-size 1 --untie-embeddings-and-output-weights "
        "--train-iters 20 --eval-interval 2 --eval-iters 1"
    )
    run(f"{flags} --metrics-file {tmp_path}/one.jsonl")
    assert len(evaluations(tmp_path / "one.jsonl")) == 11
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
        ),
    ],
)
def test_recompute_changes_no_bit(layout: str, processes: int, kinds: list[str], tmp_path: Path) -> None:
    flags = f"{MICRO} {layout} --num-layers 4 --save-interval 100"
    for number, kind in enumerate(["", *kinds]):
        folder = tmp_path / str(number)
        run(f"{flags} {kind} --save {folder} --metrics-file {folder}/m.jsonl", processes)
        assert written(folder / "m.jsonl") == written(tmp_path / "0" / "m.jsonl"), kind
        assert_same_checkpoint(checkpoint(folder, 10), checkpoint(tmp_path / "0", 10))


# ------------------------------------------------------------------------------------------------------- checkpoints


def finite(path: Path) -> Path:
    """A copy without the steps that were skipped."""
    lines = path.read_text().splitlines(keepends=True)
    kept = path.with_suffix(".finite")
    kept.write_text("".join(line for line in lines if '"skipped": true' not in line))
    return kept


def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    """Written at TP 2 x PP 2 after 5 steps. The sixth is skipped, which changes no tensor: what is saved after it is
    what was loaded."""
    flags = f"{MICRO} --num-layers 4 --fp64 --nan-action skip"
    straight = tmp_path / "straight.jsonl"
    run(f"{flags} --metrics-file {straight}", fault="nan-gradient:0:6")
    source = tmp_path / "source"
    saving = f"--save {source} --save-interval 5 --exit-interval 5 --metrics-file {tmp_path}/a.jsonl"
    run(f"{flags} {TP2 + PP2} {saving}", 4)
    before = checkpoint_tensors(checkpoint(source, 5))
    for name, layout, processes in (("one", "", 1), ("interleaved", PP2 + VPP2, 2), ("TP", TP2 + SP, 2)):
        folder = tmp_path / name
        metrics = folder / "m.jsonl"
        folder.mkdir()
        metrics.write_text((tmp_path / "a.jsonl").read_text())
        saving = f"--load {source} --save {folder} --save-interval 6 --metrics-file {metrics}"
        run(f"{flags} {layout} {saving}", processes, fault="nan-gradient:0:1")
        after = checkpoint_tensors(checkpoint(folder, 6))
        assert after.keys() == before.keys()
        assert [key for key, tensor in after.items() if not tensor.equal(before[key])] == []
        assert len(written(finite(metrics))) == 9
        assert largest_difference(finite(metrics), finite(straight)) <= 1e-10


# ---------------------------------------------------------------------------------------------------------- timeline


def test_each_stage_writes_what_it_did(tmp_path: Path) -> None:
    """4 microbatches through 2 chunks on 2 stages; live are 2 (p - r - 1) + (v - 1) p forwards ahead and one more."""
    flags = f"{MICRO} --num-layers 4 --global-batch-size 8 --train-iters 3 --timeline {tmp_path}"
    run(f"{flags} {PP2 + VPP2}", 2)
    recorded = read_steps(tmp_path)
    assert len(recorded) == 3
    for step in recorded:
        assert step.peak_live() == [5, 3]
        for spans in step.ranks:
            counts = Counter(span.action for span in spans if span.action.kind in ("forward", "backward"))
            assert set(counts.values()) == {1} and len(counts) == 2 * 2 * 4
