"""Stopping and resuming changes nothing: metrics byte for byte, tensors bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.checkpoint.rewrite import reshard
from megalite.checkpoint.storage import find_checkpoint
from tests.e2e.runs import (
    MICRO,
    assert_same_checkpoint,
    checkpoint,
    checkpoint_tensors,
    evaluations,
    largest_difference,
    newest,
    run,
    steps,
    training_state,
    written,
)

ALL_FIELDS = (
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "global_batch_size",
)
FOR_ANY_RANKS = "--fp64 --attention-backend unfused --global-batch-size 8 --train-iters 4"


def go(flags: str, folder: Path, *, processes: int = 1, load: Path | None = None) -> Path:
    """A run that saves in `folder` and resumes from `load` (default: from `folder`, where it has something)."""
    loading = f"--load {load or folder}"
    run(f"{MICRO} --save {folder} --save-interval 100 {loading} --metrics-file {folder}/m.jsonl {flags}", processes)
    return folder / "m.jsonl"


def straight_and_resumed(flags: str, tmp_path: Path, processes: int) -> tuple[Path, Path]:
    """The metrics files of 6 steps at once, and of 3 and 3."""
    flags = f"--train-iters 6 {flags}"
    straight = go(flags, tmp_path / "straight", processes=processes)
    go(f"{flags} --exit-interval 3", tmp_path / "resumed", processes=processes)
    assert newest(tmp_path / "resumed") == 3
    return straight, go(flags, tmp_path / "resumed", processes=processes)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that saved every second step. Tests copy it before they change or resume it."""
    folder = tmp_path_factory.mktemp("six_steps") / "run"
    go(f"--train-iters 6 --save-interval 2 --tensorboard-dir {folder}/tb", folder)
    return folder


def copy(folder: Path, target: Path, *, last: int) -> Path:
    """A copy of a folder, whose newest checkpoint is that of the iteration `last`."""
    shutil.copytree(folder, target)
    for path in target.glob("iter_*"):
        if path > checkpoint(target, last):
            shutil.rmtree(path)
    (target / "latest_checkpointed_iteration.txt").write_text(str(last))
    return target


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_saves_in_the_background_hold_what_saves_that_are_waited_for_hold(processes: int, tmp_path: Path) -> None:
    flags = "--bf16 --train-iters 4 --save-interval 1 --eval-interval 3 --eval-iters 1"
    metrics = {
        name: go(f"{flags} {more}", tmp_path / name, processes=processes)
        for name, more in (("waiting", ""), ("background", "--async-save"))
    }
    assert written(metrics["background"], *ALL_FIELDS) == written(metrics["waiting"], *ALL_FIELDS)
    for iteration in range(1, 5):
        assert_same_checkpoint(*(checkpoint(tmp_path / name, iteration) for name in metrics))


@pytest.mark.slow
def test_a_run_goes_on_from_resharded_files_as_from_its_own(tmp_path: Path) -> None:
    flags = "--bf16 --use-distributed-optimizer --train-iters 2"
    go(f"{flags} --exit-interval 1", tmp_path / "run", processes=2)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    new = reshard(found, tmp_path / "new")
    assert_same_checkpoint(new, found.path)
    assert len(list(new.glob("*.safetensors"))) == 1 < len(list(found.path.glob("*.safetensors")))
    own = go(flags, tmp_path / "run", processes=2)
    resharded = go(flags, tmp_path / "new", processes=2)
    assert written(own, *ALL_FIELDS)[-1:] == written(resharded, *ALL_FIELDS)
    assert_same_checkpoint(checkpoint(tmp_path / "new", 2), checkpoint(tmp_path / "run", 2))


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(
            "--num-workers 2 --bf16 --eval-interval 2 --eval-iters 1",
            2,
            id="bf16, 2 processes, evaluations",
            marks=pytest.mark.slow,
        ),
        pytest.param("--fp16 --initial-loss-scale 65536 --loss-scale-window 2", 1, id="fp16"),
        pytest.param("--optimizer sgd --dataloader-type cyclic", 1, id="sgd, cyclic"),
        pytest.param(
            "--bf16 --fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max",
            1,
            id="FP8, delayed scaling",
        ),
        pytest.param(
            "--bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer "
            "--eval-interval 2 --eval-iters 1",
            2,
            id="FP8, stored and gathered",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--num-workers 2 --lr-decay-style cosine --min-lr 1e-5 --lr-warmup-iters 2 --rampup-batch-size 2 2 8 "
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
            1,
            id="changing rates, workers",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --eval-interval 2 --eval-iters 1",
            4,
            id="PP 2, DP 2, evaluations",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_three_and_three_steps_are_six_steps(flags: str, processes: int, tmp_path: Path) -> None:
    straight, resumed = straight_and_resumed(flags, tmp_path, processes)
    assert len(steps(straight)) == 6
    assert written(resumed, *ALL_FIELDS) == written(straight, *ALL_FIELDS)
    assert evaluations(resumed, exact=True) == evaluations(straight, exact=True)
    assert_same_checkpoint(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "straight", 6))
    assert sum(step["skipped"] for step in steps(straight)) <= 2


@pytest.mark.slow
def test_dropout_on_tensor_parallel_ranks_survives_a_resume_and_any_number_of_workers(tmp_path: Path) -> None:
    """A loader that drew from the random state, or on one rank alone, would show here."""
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --num-workers"
    straight, *others = straight_and_resumed(f"{flags} 0", tmp_path / "0", 2)
    for end in ("--exit-interval 3", ""):
        with_workers = go(f"{flags} 2 --train-iters 6 {end}", tmp_path / "2", processes=2)
    for resumed in (*others, with_workers):
        assert written(resumed, *ALL_FIELDS) == written(straight, *ALL_FIELDS)
        assert_same_checkpoint(checkpoint(resumed.parent, 6), checkpoint(straight.parent, 6))


def test_resuming_again_and_again_changes_nothing(six_steps: Path, tmp_path: Path) -> None:
    for end in (1, 2, 4, 6):
        resumed = go(f"--train-iters 6 --exit-interval {end}", tmp_path)
        assert newest(tmp_path) == end
    assert written(resumed, *ALL_FIELDS) == written(six_steps / "m.jsonl", *ALL_FIELDS)
    assert_same_checkpoint(checkpoint(tmp_path, 6), checkpoint(six_steps, 6))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_process")
    go(FOR_ANY_RANKS, folder)
    return folder


@pytest.mark.parametrize(
    ("first", "second"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 4)))]
)
def test_a_run_goes_on_at_another_data_parallel_size(
    first: int, second: int, one_process: Path, tmp_path: Path
) -> None:
    go(f"{FOR_ANY_RANKS} --exit-interval 2", tmp_path, processes=first)
    resumed = go(FOR_ANY_RANKS, tmp_path, processes=second)
    assert largest_difference(resumed, one_process / "m.jsonl") <= 1e-10
    a, b = (checkpoint_tensors(checkpoint(folder, 4)) for folder in (one_process, tmp_path))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (b[name] - tensor).abs().max() <= 1e-10 * max(1.0, tensor.abs().max().item()), name
    assert training_state(checkpoint(one_process, 4)) == training_state(checkpoint(tmp_path, 4))


@pytest.mark.slow
def test_fp8_histories_and_weights_stored_in_fp8_fit_any_layout_and_do_not_grow(tmp_path: Path) -> None:
    flags = f"{FOR_ANY_RANKS} --fp8-format hybrid --fp8-amax-history-len 3"
    whole = go(f"{flags} --save-interval 1", tmp_path / "whole")
    stored = "--use-distributed-optimizer --fp8-param-gather"
    go(f"{flags} {stored} --tensor-model-parallel-size 2 --exit-interval 2", tmp_path / "cut", processes=4)
    resumed = go(flags, tmp_path / "cut")
    assert largest_difference(resumed, whole) <= 1e-10
    first, last = (checkpoint_tensors(checkpoint(tmp_path / "whole", step)) for step in (1, 4))
    sizes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (first, last)]
    half = f"--bf16 --train-iters 2 --fp8-format hybrid {stored}"
    go(half, tmp_path / "half")
    tensors = checkpoint_tensors(checkpoint(tmp_path / "half", 2))
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model.")} == {torch.bfloat16}
    assert sizes[0] == sizes[1] and sum("fp8_amax" in name for name in sizes[0]) == 2 * 4  # layers, linear layers


@pytest.mark.slow
def test_a_history_that_starts_anew_is_told_of_all_pipeline_ranks(tmp_path: Path) -> None:
    flags = f"{MICRO} --bf16 --save {tmp_path} --load {tmp_path} --fp8-format hybrid --fp8-amax-compute-algo max"
    run(f"{flags} --train-iters 1")
    resumed = run(f"{flags} --train-iters 2 --fp8-amax-history-len 3 --pipeline-model-parallel-size 2", 2)
    (note,) = (line for line in resumed.out.splitlines() if "FP8 history" in line)
    assert "no FP8 history of --fp8-amax-history-len 3 for 8 linear layers" in note  # of two layers


def test_metrics_lines_beyond_the_resumed_iteration_are_removed(tmp_path: Path) -> None:
    """A run that was killed after iteration 6 resumes from its checkpoint of iteration 2."""
    flags = "--train-iters 6 --eval-interval 3 --eval-iters 1"
    whole = written(go(f"{flags} --save-interval 2", tmp_path / "a"))
    metrics = copy(tmp_path / "a", tmp_path / "b", last=2) / "m.jsonl"
    with metrics.open("a") as file:
        file.write('{"iteration": 7, "lm_l')  # the line that the kill cut off
    go(f"{flags} --exit-interval 4", tmp_path / "b")
    assert written(metrics) == whole[:4]
    assert [record["iteration"] for record in evaluations(metrics)] == [3]


def test_a_chosen_step_is_resumed_and_tensorboard_shows_each_step_once(six_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(six_steps / "tb", tmp_path / "tb")
    flags = f"--train-iters 6 --ckpt-step 2 --tensorboard-dir {tmp_path}/tb"
    resumed = go(flags, tmp_path / "new", load=six_steps)
    assert written(resumed) == written(six_steps / "m.jsonl")[2:]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 7))
    values = [event.value for event in events.Scalars("lm loss")][2:]
    assert values == pytest.approx([step["lm_loss"] for step in steps(resumed)], rel=1e-6)


def test_a_fresh_run_starts_its_metrics_file_afresh(tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    metrics.write_text('{"iteration": 1, "lm_loss": 99.0, "grad_norm": 1.0}\n')
    run(f"{MICRO} --train-iters 2 --metrics-file {metrics}")
    assert [step["iteration"] for step in steps(metrics)] == [1, 2]
    assert steps(metrics)[0]["lm_loss"] < 10


def test_evaluation_logging_and_saving_change_nothing(six_steps: Path, tmp_path: Path) -> None:
    busy = go(
        "--train-iters 6 --eval-interval 2 --eval-iters 2 --log-interval 4 --save-interval 3 --num-workers 1 "
        f"--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --timeline {tmp_path}/timeline",
        tmp_path,
    )
    assert written(busy, *ALL_FIELDS) == written(six_steps / "m.jsonl", *ALL_FIELDS)
    a, b = (checkpoint_tensors(checkpoint(folder, 6)) for folder in (six_steps, tmp_path))
    assert all(a[name].equal(b[name]) for name in a)


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before_and_says_so(six_steps: Path, tmp_path: Path) -> None:
    folder = copy(six_steps, tmp_path / "run", last=6)
    for file in checkpoint(folder, 6).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    outcome = run(f"{MICRO} --train-iters 6 --load {folder} --metrics-file {folder}/m.jsonl")
    assert written(folder / "m.jsonl") == written(six_steps / "m.jsonl")
    assert "is truncated" in outcome.out and "iter_0000004" in outcome.out


def test_the_dropout_seed_is_resumed_and_no_load_rng_replaces_it(six_steps: Path, tmp_path: Path) -> None:
    rest = written(six_steps / "m.jsonl")[4:]
    folder = copy(six_steps, tmp_path / "run", last=4)
    flags = f"{MICRO} --train-iters 6 --load {folder} --metrics-file {tmp_path}"
    again = run(f"{flags}/a.jsonl")
    assert written(tmp_path / "a.jsonl") == rest
    assert "--no-load-rng" not in again.out
    state = training_state(checkpoint(folder, 4))
    state["training"]["dropout_seed"] = state["rng"]["dropout_seed"] = 99
    (checkpoint(folder, 4) / "training_state.json").write_text(json.dumps(state))
    (checkpoint(folder, 4) / "checksums.json").unlink()  # which a change on purpose asks for
    other = run(f"{flags}/b.jsonl")
    assert written(tmp_path / "b.jsonl") != rest
    assert "99" in other.out and "--no-load-rng" in other.out
    run(f"{flags}/c.jsonl --no-load-rng")
    assert written(tmp_path / "c.jsonl") == rest
