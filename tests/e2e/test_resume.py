"""Stopping and resuming changes nothing: metrics byte for byte, tensors bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
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


def go(flags: str, folder: Path, *, processes: int = 1, load: Path | None = None) -> Path:
    """A run that saves in `folder` and resumes from `load` (default: from `folder`, where it has something)."""
    loading = f"--load {load or folder}"
    run(f"{MICRO} --save {folder} --save-interval 100 {loading} --metrics-file {folder}/m.jsonl {flags}", processes)
    return folder / "m.jsonl"


def straight_and_resumed(flags: str, tmp_path: Path, processes: int) -> tuple[Path, Path]:
    """The metrics files of 10 steps at once, and of 5 and 5."""
    straight = go(flags, tmp_path / "straight", processes=processes)
    go(f"{flags} --exit-interval 5", tmp_path / "resumed", processes=processes)
    assert newest(tmp_path / "resumed") == 5
    return straight, go(flags, tmp_path / "resumed", processes=processes)


def test_a_run_goes_on_from_resharded_files_as_from_its_own(tmp_path: Path) -> None:
    flags = "--bf16 --use-distributed-optimizer --train-iters 4"
    go(f"{flags} --exit-interval 2", tmp_path / "run", processes=2)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    new = reshard(found, tmp_path / "new")
    assert_same_checkpoint(new, found.path)
    assert len(list(new.glob("*.distcp"))) == 1 < len(list(found.path.glob("*.distcp")))
    own = go(flags, tmp_path / "run", processes=2)
    resharded = go(flags, tmp_path / "new", processes=2)
    assert written(own, *ALL_FIELDS)[-2:] == written(resharded, *ALL_FIELDS)
    assert_same_checkpoint(checkpoint(tmp_path / "new", 4), checkpoint(tmp_path / "run", 4))


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param("--num-workers 2", 1, id="workers"),
        pytest.param(
            "--num-workers 2 --bf16 --eval-interval 2 --eval-iters 1",
            2,
            id="bf16, 2 processes, evaluations",
            marks=pytest.mark.slow,
        ),
        pytest.param("--fp16 --initial-loss-scale 65536 --loss-scale-window 3", 1, id="fp16"),
        pytest.param("--optimizer sgd --dataloader-type cyclic", 1, id="sgd, cyclic"),
        pytest.param(
            "--lr-decay-style cosine --min-lr 1e-5 --lr-warmup-iters 3 --rampup-batch-size 2 2 12 "
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
            1,
            id="changing rates",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --eval-interval 2 --eval-iters 1",
            4,
            id="PP 2, DP 2, evaluations",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_five_and_five_steps_are_ten_steps(flags: str, processes: int, tmp_path: Path) -> None:
    straight, resumed = straight_and_resumed(flags, tmp_path, processes)
    assert len(steps(straight)) == 10
    assert written(resumed, *ALL_FIELDS) == written(straight, *ALL_FIELDS)
    assert evaluations(resumed, exact=True) == evaluations(straight, exact=True)
    assert_same_checkpoint(checkpoint(tmp_path / "resumed", 10), checkpoint(tmp_path / "straight", 10))
    assert sum(step["skipped"] for step in steps(straight)) <= 2


@pytest.mark.slow
def test_dropout_on_tensor_parallel_ranks_survives_a_resume_and_any_number_of_workers(tmp_path: Path) -> None:
    """A loader that drew from the random state, or on one rank alone, would show here."""
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --num-workers"
    straight, *others = straight_and_resumed(f"{flags} 0", tmp_path / "0", 2)
    for end in ("--exit-interval 5", ""):
        with_workers = go(f"{flags} 2 {end}", tmp_path / "2", processes=2)
    for resumed in (*others, with_workers):
        assert written(resumed, *ALL_FIELDS) == written(straight, *ALL_FIELDS)
        assert_same_checkpoint(checkpoint(resumed.parent, 10), checkpoint(straight.parent, 10))


def test_resuming_again_and_again_changes_nothing(tmp_path: Path) -> None:
    straight = go("", tmp_path / "straight")
    for end in (2, 3, 7, 10):
        resumed = go(f"--exit-interval {end}", tmp_path / "resumed")
        assert newest(tmp_path / "resumed") == end
    assert written(resumed, *ALL_FIELDS) == written(straight, *ALL_FIELDS)
    assert_same_checkpoint(checkpoint(tmp_path / "resumed", 10), checkpoint(tmp_path / "straight", 10))


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_run_goes_on_at_another_data_parallel_size(first: int, second: int, tmp_path: Path) -> None:
    flags = "--fp64 --attention-backend unfused --global-batch-size 8"
    straight = go(flags, tmp_path / "straight")
    go(f"{flags} --exit-interval 5", tmp_path / "resumed", processes=first)
    resumed = go(flags, tmp_path / "resumed", processes=second)
    assert largest_difference(resumed, straight) <= 1e-10
    a, b = (checkpoint_tensors(checkpoint(tmp_path / name, 10)) for name in ("straight", "resumed"))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (b[name] - tensor).abs().max() <= 1e-10 * max(1.0, tensor.abs().max().item()), name
    assert training_state(checkpoint(tmp_path / "straight", 10)) == training_state(checkpoint(tmp_path / "resumed", 10))


def test_metrics_lines_beyond_the_resumed_iteration_are_removed(tmp_path: Path) -> None:
    """A run that was killed after iteration 10 resumes from its checkpoint of iteration 4."""
    metrics = go("--save-interval 4 --eval-interval 5 --eval-iters 1", tmp_path)
    whole = written(metrics)
    for later in (8, 10):
        shutil.rmtree(checkpoint(tmp_path, later))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with metrics.open("a") as file:
        file.write('{"iteration": 11, "lm_l')  # the line that the kill cut off
    go("--exit-interval 6 --eval-interval 5 --eval-iters 1", tmp_path)
    assert written(metrics) == whole[:6]
    assert [record["iteration"] for record in evaluations(metrics)] == [5]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """A run that is lost after iteration 10 resumes from its checkpoint of iteration 4."""
    flags = f"--save-interval 4 --tensorboard-dir {tmp_path}/tb"
    go(flags, tmp_path / "a")
    resumed = go(f"{flags} --ckpt-step 4", tmp_path / "b", load=tmp_path / "a")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 11))
    values = [event.value for event in events.Scalars("lm loss")][4:]
    assert values == pytest.approx([step["lm_loss"] for step in steps(resumed)], rel=1e-6)


def test_a_fresh_run_starts_its_metrics_file_afresh(tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    metrics.write_text('{"iteration": 1, "lm_loss": 99.0, "grad_norm": 1.0}\n')
    run(f"{MICRO} --train-iters 2 --metrics-file {metrics}")
    assert [step["iteration"] for step in steps(metrics)] == [1, 2]
    assert steps(metrics)[0]["lm_loss"] < 10


def test_evaluation_logging_and_saving_change_nothing(tmp_path: Path) -> None:
    plain = go("", tmp_path / "plain")
    busy = go(
        "--eval-interval 3 --eval-iters 2 --log-interval 4 --save-interval 2 --num-workers 1 --log-params-norm "
        f"--log-num-zeros-in-grad --timing-log-level 2 --tensorboard-dir {tmp_path}/tb --timeline {tmp_path}/timeline",
        tmp_path / "busy",
    )
    assert written(busy, *ALL_FIELDS) == written(plain, *ALL_FIELDS)
    a, b = (checkpoint_tensors(checkpoint(tmp_path / name, 10)) for name in ("plain", "busy"))
    assert all(a[name].equal(b[name]) for name in a)


def test_a_chosen_step_is_resumed(tmp_path: Path) -> None:
    straight = go("--save-interval 2", tmp_path / "a")
    resumed = go("--ckpt-step 4", tmp_path / "b", load=tmp_path / "a")
    assert written(resumed) == written(straight)[4:]


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    straight = go("--save-interval 4", tmp_path)
    whole = written(straight)
    for file in checkpoint(tmp_path, 10).glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    outcome = run(f"{MICRO} --load {tmp_path} --metrics-file {tmp_path}/m.jsonl")
    assert written(straight) == whole
    assert "is truncated" in outcome.out and "iter_0000008" in outcome.out


def test_the_dropout_seed_is_resumed_and_no_load_rng_replaces_it(tmp_path: Path) -> None:
    straight = go("", tmp_path / "a")
    go("--exit-interval 5", tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    again = run(f"{MICRO} --load {tmp_path}/b --metrics-file {tmp_path}/b.jsonl")
    assert written(tmp_path / "b.jsonl") == written(straight)[5:]
    assert "--no-load-rng" not in again.out
    state = json.loads((checkpoint(tmp_path / "c", 5) / "training_state.json").read_text())
    state["training"]["dropout_seed"] = state["rng"]["dropout_seed"] = 99
    (checkpoint(tmp_path / "c", 5) / "training_state.json").write_text(json.dumps(state))
    (checkpoint(tmp_path / "c", 5) / "checksums.json").unlink()  # which a change on purpose asks for
    other = run(f"{MICRO} --load {tmp_path}/c --metrics-file {tmp_path}/c.jsonl")
    assert written(tmp_path / "c.jsonl") != written(straight)[5:]
    assert "99" in other.out and "--no-load-rng" in other.out
    run(f"{MICRO} --load {tmp_path}/c --metrics-file {tmp_path}/d.jsonl --no-load-rng")
    assert written(tmp_path / "d.jsonl") == written(straight)[5:]
