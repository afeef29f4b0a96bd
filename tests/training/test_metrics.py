"""What is printed and written of steps, and what the flags that name outputs need."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.config.schema import RunConfig
from megalite.training.metrics import EvaluationRecord, LogLines, MetricsFile, StepRecord, check_sinks, evaluated_splits


def record(iteration: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "consumed_tokens": 64 * iteration,
        "counted_tokens": 64,
        "lm_loss": 3.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "global_batch_size": 4,
        "elapsed_ms": 1.0,
        "tokens_per_second": 64e3,
        "tflops_per_device": 1.0,
        **changes,
    }
    return StepRecord(**values)


def lines(*records: StepRecord) -> LogLines:
    config = RunConfig()
    config.logging.log_interval = 2
    log = LogLines(config, 10)
    log.first = False
    for each in records:
        log.step(each)
    return log


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 128.0, 2.0**32])
def test_the_loss_scale_is_printed_as_it_is(scale: float, capsys: pytest.CaptureFixture[str]) -> None:
    lines(record(1), record(2, loss_scale=scale))
    printed = capsys.readouterr().out.partition("loss scale: ")[2].split()[0]
    assert float(printed) == scale


def test_a_step_of_no_counted_token_is_told_and_left_out_of_the_mean_loss(capsys: pytest.CaptureFixture[str]) -> None:
    lines(record(1, counted_tokens=0, lm_loss=math.nan), record(2, lm_loss=5.0))
    out = capsys.readouterr().out
    assert out.count("iteration 1: no token of this batch counts") == 1 and "iteration 2: no token" not in out
    assert "lm loss: 5.000000E+00" in out and "number of nan iterations:   0" in out


def test_a_balancing_loss_is_printed_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    load = {"0/balance_loss": 0.0, "0/z_loss": 0.0, "0/max_over_mean": 1.5, "0/dropped": 0.0, "0/entropy": 1.0}
    lines(record(1), record(2, moe=load))
    out = capsys.readouterr().out
    assert "tokens per expert, max over mean: 1.50" in out and "balancing" not in out
    lines(record(1), record(2, moe=load | {"0/balance_loss": 0.25}))
    assert "load balancing loss: 2.500000E-01" in capsys.readouterr().out


@pytest.mark.parametrize(("loss", "expected"), [(math.log(2), 2.0), (1e9, math.exp(20)), (math.nan, None)])
def test_the_perplexity_of_a_loss_that_is_no_number_is_none_either(
    loss: float, expected: float | None, tmp_path: Path
) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.evaluation(EvaluationRecord(1, "valid", loss))
    file.step(record(2, counted_tokens=0, lm_loss=math.nan))
    file.close()
    evaluation, step = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert evaluation["ppl"] == (None if expected is None else pytest.approx(expected))
    assert step["lm_loss"] is None


@pytest.mark.parametrize(
    ("flag", "module"), [("tensorboard_dir", "torch.utils.tensorboard"), ("wandb_project", "wandb")]
)
def test_a_package_that_cannot_be_imported_is_named_with_its_flag_before_anything_is_built(
    flag: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    setattr(config.logging, flag, str(tmp_path / "x"))
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises an ImportError
    (problem,) = check_sinks(config)
    assert f"--{flag.replace('_', '-')}" in problem and "pip install" in problem


def test_a_metrics_file_tells_which_splits_were_evaluated_at_an_iteration(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert evaluated_splits(path, 4) == set()
    written = [{"iteration": 2, "split": "test"}, {"iteration": 4}, {"iteration": 4, "split": "valid"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in written) + '{"iteration": 4, "spl')
    assert evaluated_splits(path, 4) == {"valid"}
