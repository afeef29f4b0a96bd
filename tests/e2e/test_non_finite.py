"""A loss or gradient that isn't finite, on one rank alone: all ranks stop or skip together, in every precision."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import MICRO, checkpoint, checkpoint_tensors, run, steps

BASE = f"{MICRO} --hidden-dropout 0 --attention-dropout 0 --save-interval 1 "


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        pytest.param("--clip-grad 1", "nan-gradient:1:3", id="fp32, clip"),
        pytest.param("--pipeline-model-parallel-size 2 --bf16 --clip-grad 0", "nan-loss:1:3", id="last stage's loss"),
    ],
)
def test_stop_is_one_message_that_names_the_iteration(flags: str, fault: str, tmp_path: Path) -> None:
    outcome = run(f"{BASE} {flags} --save {tmp_path}", 2, fault=fault, check=False)
    assert outcome.codes == (1, 1)
    assert "iteration 3" in outcome.err and "--nan-action skip" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("error:") == 1
    # What was saved before is whole.
    assert not checkpoint(tmp_path, 3).exists()
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(checkpoint(tmp_path, 2)).values())


def test_skip_leaves_the_state_of_all_ranks_as_it_was(tmp_path: Path) -> None:
    """A gradient, then a loss; in other layouts: `tests/training/test_skips.py`."""
    metrics = tmp_path / "m.jsonl"
    flags = f"{BASE} --bf16 --train-iters 5 --log-interval 5 --nan-action skip --save {tmp_path}"
    outcome = run(f"{flags} --metrics-file {metrics}", 2, fault="nan-gradient:1:2,nan-loss:1:3")
    recorded = steps(metrics)  # strict JSON, which knows no NaN
    assert [step["skipped"] for step in recorded] == [False, True, True, False, False]
    assert recorded[1]["grad_norm"] is None and recorded[2]["lm_loss"] is None
    before, after, end = (checkpoint_tensors(checkpoint(tmp_path, k)) for k in (1, 3, 5))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in end.values())
    assert any(not torch.equal(after[name], end[name]) for name in end)
    # Lines after steps 1 and 5.
    first, last = (line for line in outcome.out.splitlines() if "elapsed time per iteration" in line)
    assert "skipped iterations:   0" in first
    assert "skipped iterations:   2" in last and "nan iterations:   1" in last
    losses = [recorded[k]["lm_loss"] for k in (3, 4)]  # a skipped step's loss is left out
    assert f"lm loss: {sum(losses) / 2:.6E}" in last


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--fp16 --loss-scale 1e30", id="fp16, constant scale"),
        pytest.param("--fp16 --initial-loss-scale 1e30 --min-loss-scale 1e30", id="fp16, dynamic scale at its floor"),
        pytest.param("--bf16 --nan-action skip --lr 1e38 --clip-grad 0", id="bf16, weights lost"),
        pytest.param("--nan-action skip --lr 1e38 --clip-grad 0", id="fp32, weights lost", marks=pytest.mark.slow),
    ],
)
def test_steps_that_are_all_skipped_end_the_run_after_as_many_as_allowed(flags: str, tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    flags = f"{MICRO} {flags} --max-skips-in-a-row 4 --train-iters 20 --metrics-file {metrics}"
    outcome = run(flags, check=False)
    assert outcome.code == 1
    skipped = [step["skipped"] for step in steps(metrics)]
    assert skipped[-3:] == [True] * 3 and not any(skipped[:-3])  # the fourth is not taken, and told
    assert f"iteration {len(skipped) + 1}: " in outcome.err and "--max-skips-in-a-row 4" in outcome.err
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err


def test_skips_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    flags = f"{MICRO} --fp16 --loss-scale 1e30 --max-skips-in-a-row 3 --save {tmp_path} --load {tmp_path}"
    run(f"{flags} --exit-interval 2")
    outcome = run(flags, check=False)
    assert outcome.code == 1 and "iteration 3: " in outcome.err


def test_a_single_infinity_with_the_scale_at_its_floor_is_one_skipped_step(tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    flags = f"{MICRO} --fp16 --initial-loss-scale 1 --min-loss-scale 1 --train-iters 5 --metrics-file {metrics}"
    run(flags, fault="inf-gradient:0:3")
    assert [step["skipped"] for step in steps(metrics)] == [False, False, True, False, False]


def test_a_float16_overflow_lowers_the_scale_by_hysteresis(tmp_path: Path) -> None:
    """The first bad step is tolerated, each later one halves the scale until gradients fit."""
    metrics = tmp_path / "m.jsonl"
    start = 2.0**28
    flags = f"--fp16 --initial-loss-scale {start:.0f} --hysteresis 2 --lr-decay-style linear --train-iters 20"
    run(f"{MICRO} {flags} --metrics-file {metrics}")
    recorded = steps(metrics)
    bad = next(number for number, step in enumerate(recorded) if not step["skipped"])
    assert 2 < bad < 18
    expected = [start, start] + [start / 2**k for k in range(1, bad)]
    assert [step["loss_scale"] for step in recorded[: bad + 1]] == expected[: bad + 1]
    assert all(step["skipped"] for step in recorded[:bad])
    # Skipped steps consume data but move neither the weights nor the learning rate.
    assert {step["learning_rate"] for step in recorded[: bad + 1]} == {1e-3}
    assert [step["consumed_samples"] for step in recorded] == [4 * (k + 1) for k in range(20)]
    assert all(math.isfinite(step["grad_norm"]) for step in recorded[bad:] if not step["skipped"])


def test_a_fixed_float16_scale_stays_and_changes_no_result(tmp_path: Path) -> None:
    for scale in (256, 1024):
        run(f"{MICRO} --fp16 --loss-scale {scale} --train-iters 4 --metrics-file {tmp_path}/{scale}.jsonl")
    a, b = (steps(tmp_path / f"{scale}.jsonl") for scale in (256, 1024))
    assert {step["loss_scale"] for step in a} == {256.0} and {step["loss_scale"] for step in b} == {1024.0}
    assert [step["lm_loss"] for step in a] == pytest.approx([step["lm_loss"] for step in b], rel=2e-3)
    assert [step["grad_norm"] for step in a] == pytest.approx([step["grad_norm"] for step in b], rel=2e-2)
