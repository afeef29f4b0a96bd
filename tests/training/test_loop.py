"""What a run does around its steps: evaluations, saves, skipped steps, the sum of the ranks' losses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.resolve import resolve
from megalite.data.tokenizers import NullTokenizer
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.training import evaluation
from megalite.training.loop import Loop
from megalite.training.metrics import StepRecord
from megalite.training.prepare import Prepared, prepare_config
from megalite.training.run import build_run
from megalite.training.trainer import NonFiniteError, summed_over_ranks
from tests.e2e.runs import checkpoint, checkpoint_tensors, evaluations, newest, training_state
from tests.peft.runs import adapter_config, build


def prepared(peft: str = "none", **fields: Any) -> Prepared:
    return prepare_config(resolve(adapter_config(peft, **fields), 1), Environment())


def finish(parts: Prepared) -> None:
    run = build_run(parts, single_process_mesh())
    try:
        Loop(run).run()
    finally:
        run.close()


def places(folder: Path) -> dict[str, Any]:
    return {"save": str(folder), "load": str(folder), "save_interval": 1, "keep_last_checkpoints": 2, "eval_iters": 0}


def test_a_run_that_only_skips_steps_deletes_no_good_checkpoint_and_leaves_the_adapter(tmp_path: Path) -> None:
    common = {**places(tmp_path / "run"), "save_adapter": str(tmp_path / "adapter"), "train_iters": 20}
    finish(prepared("lora", **common | {"train_iters": 3}))
    kept = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    skipping = {"nan_action": "skip", "max_skips_in_a_row": 6}
    run = build(adapter_config("lora", **common, **skipping))
    step = run.trainer._forward_backward
    run.trainer._forward_backward = lambda *args: step(*args) * math.nan  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="--max-skips-in-a-row 6"):
        Loop(run).run()
    run.close()
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(checkpoint(tmp_path / "run", 3)).values())
    assert [n for n in range(1, 20) if checkpoint(tmp_path / "run", n).exists()] == [2, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == kept


def test_a_run_that_stops_at_a_bad_step_finishes_the_save_under_way(tmp_path: Path) -> None:
    run = build(adapter_config("none", save=str(tmp_path), save_interval=2, async_save=True, train_iters=9))
    step, submit = run.trainer._forward_backward, run.saver.submit
    bad = lambda *args: step(*args) * (math.nan if run.state.iteration == 2 else 1.0)  # noqa: E731
    run.trainer._forward_backward = bad  # type: ignore[method-assign]
    run.saver.submit = lambda job, done: submit(lambda group: (time.sleep(0.3), job(group)), done)  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError):
        Loop(run).run()
    assert newest(tmp_path) == 2


def test_the_last_checkpoint_holds_the_best_loss_of_the_last_evaluation(tmp_path: Path) -> None:
    best = {"save_best_adapter": str(tmp_path / "best"), "eval_iters": 1, "eval_interval": 100, "train_iters": 2}
    finish(prepared("lora", **places(tmp_path / "run") | best))
    state = training_state(checkpoint(tmp_path / "run", 2))["training"]
    assert math.isfinite(state["best_valid_loss"])
    assert state["consumed_valid_samples"] == 0  # a run that goes on reads as if it hadn't ended here


def test_the_checkpoint_of_the_lowest_validation_loss_stays(tmp_path: Path) -> None:
    keeping = {"save": str(tmp_path), "save_interval": 1, "keep_best": 1, "eval_iters": 1, "eval_interval": 1}
    # Steps so large that the loss doesn't simply fall.
    finish(prepared(train_iters=5, lr=3.0, metrics_file=str(tmp_path / "m.jsonl"), **keeping))
    losses = [line["lm_loss"] for line in evaluations(tmp_path / "m.jsonl") if line["split"] == "valid"]
    best = losses.index(min(losses)) + 1
    assert len(losses) == 5 and {best, 5} == {n for n in range(1, 6) if checkpoint(tmp_path, n).exists()}
    assert training_state(checkpoint(tmp_path, best))["training"]["valid_loss"] == min(losses)


class Deaf(NullTokenizer):
    """A tokenizer that must not be asked."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise AssertionError(f"tokenized again: {texts}")


def test_prompts_are_tokenized_before_the_run_and_not_again(capsys: pytest.CaptureFixture[str]) -> None:
    parts = prepared(eval_prompt=["1 2"], eval_iters=1, eval_interval=1, train_iters=2)
    finish(replace(parts, tokenizer=Deaf(parts.tokenizer.vocab_size - 1)))
    assert capsys.readouterr().out.count("prompt: 1 2\n  model: ") == 2


def test_a_step_without_a_counted_token_has_no_loss() -> None:
    run = build(adapter_config("none", eval_iters=0))
    batches = run.trainer.microbatches
    run.trainer.microbatches = (replace(each, loss_mask=torch.zeros_like(each.loss_mask)) for each in batches)
    record = run.trainer.step()
    run.close()
    assert math.isnan(record.lm_loss) and record.counted_tokens == 0 and not record.skipped
    assert run.state.nans == 0


def _sums(mesh: Mesh) -> list[float]:
    finite, alone = torch.tensor(2.0), torch.tensor(math.nan if mesh.tp.rank == 1 else 2.0)
    return [
        summed_over_ranks(each, mesh).item()
        for each in (finite, torch.tensor(math.inf), torch.tensor(-math.inf), torch.tensor(math.nan), alone)
    ]


def test_a_sum_of_losses_over_tensor_parallel_ranks_is_that_of_one(pool: ProcessPool) -> None:
    for sums in pool.run(_sums, 2, layout=Layout(tp=2)):
        assert sums[:3] == [2.0, math.inf, -math.inf]
        assert all(map(math.isnan, sums[3:]))


def test_the_first_skip_in_fp16_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    fp16 = {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**60, "nan_action": "skip", "eval_iters": 0}
    finish(prepared(**fp16, train_iters=3))
    assert capsys.readouterr().out.count("the loss scale is being found: skipped steps at the start are normal") == 1


@pytest.mark.parametrize(
    ("saves", "told"), [(False, "nothing was saved"), (True, "what came after the last save wasn't saved")]
)
def test_an_interrupt_tells_what_is_lost(
    saves: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(adapter_config("none", eval_iters=0, save=str(tmp_path) if saves else None))
    loop, step = Loop(run), run.trainer.step
    steps = iter([step, step])
    run.trainer.step = lambda: next(steps, _interrupt)()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    run.close()
    assert f"interrupted after iteration 2: {told}" in capsys.readouterr().out


def _interrupt() -> StepRecord:
    raise KeyboardInterrupt


def test_a_long_evaluation_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_SECONDS", -1.0)
    finish(prepared(eval_iters=2, train_iters=1))
    out = capsys.readouterr().out
    assert "valid: 1 of at most 2 global batches evaluated" in out and "valid: 2 of at most 2" in out
