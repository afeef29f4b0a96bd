"""A loss that is far above the last ones sends the run back to its checkpoint and past the data, once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.training.loop import Loop
from megalite.training.run import Run
from megalite.training.spikes import Rollback, SpikeError, SpikeHistory
from tests.e2e.runs import (
    MICRO,
    TOLERANCE,
    assert_same_checkpoint,
    checkpoint,
    largest_difference,
    newest,
    run,
    steps,
    training_state,
    written,
)
from tests.peft.runs import adapter_config, build

BATCH = 4
SPIKING = {"rollback_on_spike": True, "spike_window": 3, "spike_threshold": 8.0}


def run_in(folder: Path, peft: str = "none", **fields: Any) -> Run:
    common = {"save": str(folder), "load": str(folder), "save_interval": 3, "metrics_file": f"{folder}/m.jsonl"}
    return build(adapter_config(peft, eval_iters=0, dropout=0.1, **{"train_iters": 10, **common, **fields}))


def plant(run: Run, spikes: Callable[[set[int]], bool]) -> None:
    """Losses of steps whose samples are such are ten times what they were."""
    step = run.trainer._forward_backward

    def planted(batches: list[Any], *rest: Any) -> Tensor:
        samples = {int(number) for batch in batches for number in batch.sample_ids}
        return step(batches, *rest) * (10 if spikes(samples) else 1)

    run.trainer._forward_backward = planted  # type: ignore[method-assign]


def finish(run: Run, spikes: Callable[[set[int]], bool] = lambda _: False) -> None:
    plant(run, spikes)
    try:
        Loop(run).run()
    finally:
        run.close()


def test_the_limit_is_mean_and_deviations_of_the_last_losses() -> None:
    losses = [4.0, 3.5, 3.9, 3.1, 3.3]
    history = SpikeHistory()
    assert history.limit(4, 2.0) is None
    for loss in losses:
        history.add(loss, 4)
    assert history.losses == losses[1:]
    assert history.limit(4, 2.0) == pytest.approx(np.mean(losses[1:]) + 2.0 * np.std(losses[1:]), rel=1e-15)
    assert history.limit(5, 2.0) is None


def test_a_history_is_read_as_it_was_written_and_nonsense_is_refused() -> None:
    history = SpikeHistory([1.5, 2.5], [Rollback(7, 9.0, 3.0, 6, 24, 28), Rollback(8, 9.0, 3.0, 6, 28, 36)])
    assert SpikeHistory.from_dict(history.to_dict()) == history
    assert SpikeHistory.from_dict({}) == SpikeHistory()
    assert history.passed_samples == 12 and history.in_a_row(6) == 2 and history.in_a_row(4) == 0
    for wrong in ({"losses": [None]}, {"rollbacks": [{"iteration": 1}]}, {"rollbacks": 3}):
        with pytest.raises((TypeError, ValueError)):
            SpikeHistory.from_dict(wrong)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps, of which the seventh reads sample 26, with a spike that sends the run back to iteration 6."""
    folder = tmp_path_factory.mktemp("spike")
    finish(run_in(folder, **SPIKING), lambda samples: 26 in samples)
    return folder


def test_a_planted_spike_rolls_back_once_and_each_step_is_told_once(rolled_back: Path) -> None:
    assert [step["iteration"] for step in steps(rolled_back / "m.jsonl")] == list(range(1, 11))
    history = training_state(checkpoint(rolled_back, 10))["spikes"]
    (rollback,) = history["rollbacks"]
    assert (rollback["iteration"], rollback["to_iteration"]) == (7, 6)
    assert (rollback["first_sample"], rollback["end_sample"]) == (24, 28)
    assert rollback["loss"] > rollback["limit"]
    assert len(history["losses"]) == 3


def test_after_a_rollback_the_run_is_one_from_the_checkpoint_on_the_data_behind(
    rolled_back: Path, tmp_path: Path
) -> None:
    finish(run_in(tmp_path, exit_interval=6))
    other = run_in(tmp_path)
    assert other.state.iteration == 6 and other.datasets.train is not None
    other.trainer.microbatches = other.feed._microbatches(other.datasets.train, start=28)
    finish(other)
    assert written(tmp_path / "m.jsonl") == written(rolled_back / "m.jsonl")


@pytest.mark.parametrize(
    "fields",
    [
        {"peft": "lora", "fp16": True, "initial_loss_scale": 65536.0, "nan_action": "skip", "loss_scale_window": 2},
        {
            **{"bf16": True, "async_save": True},
            **{"fp8_format": "hybrid", "fp8_backend": "emulated", "fp8_amax_history_len": 4},
            **{"fp8_amax_compute_algo": "max", "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"},
        },
    ],
    ids=["adapter, loss scale", "FP8 histories and moments, saved in the background"],
)
def test_all_state_goes_back(fields: dict[str, Any], tmp_path: Path) -> None:
    """As above."""
    fields = {"fp64": False, "train_iters": 8, "save_interval": 6, **fields}
    finish(run_in(tmp_path / "back", **fields, **SPIKING), lambda samples: 26 in samples)
    finish(run_in(tmp_path / "behind", **fields, exit_interval=6))
    other = run_in(tmp_path / "behind", **fields)
    assert other.datasets.train is not None
    other.trainer.microbatches = other.feed._microbatches(other.datasets.train, start=28)
    finish(other)
    assert written(tmp_path / "back" / "m.jsonl") == written(tmp_path / "behind" / "m.jsonl")
    assert len(training_state(checkpoint(tmp_path / "back", 8))["spikes"]["rollbacks"]) == 1


def test_another_run_is_the_same_and_one_that_was_killed_after_the_rollback_repeats_nothing(
    rolled_back: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(self: Loop) -> None:
        if self.state.iteration == 6 and self.parts.progress.spikes.rollbacks:
            self.parts.save()
            raise Killed
        self.parts.save()
        self._newest = self.state.iteration

    killing = run_in(tmp_path, **SPIKING)
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_save", killed)
        with pytest.raises(Killed):
            finish(killing, lambda samples: 26 in samples)
    resumed = run_in(tmp_path, **SPIKING)
    assert resumed.state.iteration == 6 and resumed.progress.next_sample == 28

    def meets(samples: set[int]) -> bool:
        assert min(samples) >= 28
        return False

    finish(resumed, meets)
    assert written(tmp_path / "m.jsonl") == written(rolled_back / "m.jsonl")
    assert_same_checkpoint(checkpoint(tmp_path, 10), checkpoint(rolled_back, 10))


def test_a_resumed_run_judges_by_the_losses_before(rolled_back: Path, tmp_path: Path) -> None:
    """And goes on behind what was passed over, also where it doesn't watch for spikes any more."""
    shutil.copytree(rolled_back, tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    finish(run_in(tmp_path, **SPIKING))
    assert written(tmp_path / "m.jsonl") == written(rolled_back / "m.jsonl")
    assert_same_checkpoint(checkpoint(tmp_path, 10), checkpoint(rolled_back, 10))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    finish(run_in(tmp_path))
    assert written(tmp_path / "m.jsonl") == written(rolled_back / "m.jsonl")
    assert training_state(checkpoint(tmp_path, 10))["spikes"]["losses"] == []


def test_spikes_that_no_data_explain_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        SpikeError, match="iteration 7: .* after 2 rollbacks to iteration 6, .*--max-rollbacks-in-a-row 2"
    ):
        finish(run_in(tmp_path, **SPIKING, max_rollbacks_in_a_row=2), lambda samples: min(samples) >= 24)
    assert newest(tmp_path) == 6
    passed = [
        (r["first_sample"], r["end_sample"]) for r in training_state(checkpoint(tmp_path, 6))["spikes"]["rollbacks"]
    ]
    assert passed == [(24, 28), (28, 32)]


def test_a_spike_before_the_first_checkpoint_is_told_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(run_in(tmp_path, **SPIKING, save_interval=6, train_iters=6), lambda samples: 14 in samples)
    assert "iteration 4: lm loss" in (out := capsys.readouterr().out) and "no checkpoint to go back to" in out
    assert training_state(checkpoint(tmp_path, 6))["spikes"]["rollbacks"] == []


def test_a_checkpoint_with_nonsense_rollbacks_is_refused(rolled_back: Path, tmp_path: Path) -> None:
    shutil.copytree(rolled_back, tmp_path, dirs_exist_ok=True)
    (checkpoint(tmp_path, 10) / "checksums.json").unlink()
    file = checkpoint(tmp_path, 10) / "training_state.json"
    file.write_text(file.read_text().replace('"end_sample": 28', '"end_sample": 20'))
    with pytest.raises(CheckpointError, match="tells no losses and rollbacks: .*don't ascend"):
        run_in(tmp_path)


def test_all_ranks_go_back_together_from_a_spike_of_one(tmp_path: Path) -> None:
    """With sharded states and workers that read ahead; the losses are those of one process."""
    flags = (
        f"{MICRO} --fp64 --train-iters 6 --save-interval 4 --rollback-on-spike --spike-window 3 --attention-dropout 0 "
        "--hidden-dropout 0 "
    )
    for name, processes, how in (("one", 1, ""), ("two", 2, "--use-distributed-optimizer --num-workers 1")):
        places = f"--save {tmp_path}/{name} --metrics-file {tmp_path}/{name}.jsonl"
        outcome = run(f"{flags} {how} {places}", processes, fault=f"spike:{processes - 1}:5")
        assert outcome.out.count("back to iteration 4, past samples 16 to 19") == 1
    assert largest_difference(tmp_path / "two.jsonl", tmp_path / "one.jsonl") <= TOLERANCE
