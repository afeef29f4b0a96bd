"""What a run takes from a checkpoint: weights alone, other precisions, the schedule, the network's flags."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.e2e.runs import (
    MICRO,
    MICRO_RUN,
    checkpoint,
    checkpoint_tensors,
    newest,
    run,
    steps,
    training_state,
    written,
)

SOURCE_STEPS = 20


def save_source(folder: Path, flags: str) -> Path:
    """A model that has learnt something."""
    saving = f"--save {folder} --save-interval 1000 --log-interval 100"
    run(f"{MICRO} --lr 2e-2 --train-iters {SOURCE_STEPS} {saving} {flags}")
    return folder


@pytest.fixture(scope="module")
def bf16_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("bf16"), "--bf16")


@pytest.fixture(scope="module")
def fp32_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("fp32"), "")


def tensors(root: Path, iteration: int, prefix: str = "model.") -> dict[str, Tensor]:
    """Entries that begin with `prefix`, by the rest of their names."""
    entries = checkpoint_tensors(checkpoint(root, iteration))
    return {name.removeprefix(prefix): tensor for name, tensor in entries.items() if name.startswith(prefix)}


def assert_all_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a and a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def load(source: Path, target: Path, flags: str) -> Path:
    """A run that begins from `source` and saves in `target`; its metrics file."""
    run(f"{MICRO} --load {source} --save {target} --save-interval 1000 --metrics-file {target}/m.jsonl {flags}")
    return target / "m.jsonl"


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 65536"])
def test_finetune_at_learning_rate_zero_leaves_the_loaded_weights(
    precision: str, bf16_source: Path, tmp_path: Path
) -> None:
    metrics = load(bf16_source, tmp_path, f"{precision} --finetune --lr 0 --train-iters 1")
    dtype = torch.bfloat16 if precision == "--bf16" else torch.float16
    before = {name: tensor.to(dtype) for name, tensor in tensors(bf16_source, SOURCE_STEPS).items()}
    assert_all_equal(tensors(tmp_path, 1), before)
    assert newest(tmp_path) == 1
    assert [(step["iteration"], step["consumed_samples"], step["skipped"]) for step in steps(metrics)] == [
        (1, 4, False)
    ]


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_main_parameters_follow_the_loaded_weights(flag: str, bf16_source: Path, tmp_path: Path) -> None:
    """With main parameters of before the load, the first update would throw the model back to its random start."""
    end = 2 if flag == "--finetune" else SOURCE_STEPS + 2
    metrics = load(bf16_source, tmp_path, f"--bf16 {flag} --lr 1e-5 --train-iters {end} --override-opt_param-scheduler")
    losses = [step["lm_loss"] for step in steps(metrics)]
    learnt = 3.4  # an untrained one has ln 47 = 3.85
    assert len(losses) == 2 and max(losses) < learnt
    model, main = tensors(tmp_path, end), tensors(tmp_path, end, "optimizer.main.")
    assert_all_equal({name: tensor.bfloat16() for name, tensor in main.items()}, model)


def test_no_load_optim_goes_on_with_the_iteration_and_a_fresh_optimizer(fp32_source: Path, tmp_path: Path) -> None:
    end = SOURCE_STEPS + 1
    metrics = load(
        fp32_source,
        tmp_path,
        f"--no-load-optim --lr 0 --train-iters {end} --override-opt_param-scheduler --clip-grad 0",
    )
    assert [step["iteration"] for step in steps(metrics)] == [end]
    assert_all_equal(tensors(tmp_path, end), tensors(fp32_source, SOURCE_STEPS))
    state = training_state(checkpoint(tmp_path, end))
    assert state["optimizer_steps"] == 1
    # After the first step of an optimizer the moments are (1 - beta) times the gradient and its square.
    first, second = tensors(tmp_path, end, "optimizer.exp_avg."), tensors(tmp_path, end, "optimizer.exp_avg_sq.")
    for name, moment in first.items():
        torch.testing.assert_close(second[name], 1e-3 * (moment / 0.1).square(), rtol=1e-4, atol=1e-12)


def test_a_checkpoint_without_optimizer_state_serves_for_weights_alone(tmp_path: Path) -> None:
    save_source(tmp_path / "a", "--no-save-optim --train-iters 2")
    assert not tensors(tmp_path / "a", 2, "optimizer.")
    outcome = run(f"{MICRO} --load {tmp_path}/a", check=False)
    assert outcome.code == 1 and "--no-load-optim" in outcome.err and "Traceback" not in outcome.err
    load(tmp_path / "a", tmp_path / "b", "--no-load-optim --train-iters 3 --lr 0")
    assert_all_equal(tensors(tmp_path / "b", 3), tensors(tmp_path / "a", 2))


def test_a_float32_checkpoint_becomes_bf16_weights_and_the_same_main_parameters(
    fp32_source: Path, tmp_path: Path
) -> None:
    end = SOURCE_STEPS + 1
    load(fp32_source, tmp_path, f"--bf16 --lr 0 --train-iters {end} --override-opt_param-scheduler")
    before = tensors(fp32_source, SOURCE_STEPS)
    assert_all_equal(tensors(tmp_path, end, "optimizer.main."), before)
    assert_all_equal(tensors(tmp_path, end), {name: tensor.bfloat16() for name, tensor in before.items()})


@pytest.mark.parametrize("flag", ["", "--no-load-optim"])
def test_a_float32_run_takes_a_bf16_checkpoints_main_parameters(flag: str, bf16_source: Path, tmp_path: Path) -> None:
    end = SOURCE_STEPS + 1
    load(bf16_source, tmp_path, f"{flag} --lr 0 --train-iters {end} --override-opt_param-scheduler")
    assert_all_equal(tensors(tmp_path, end), tensors(bf16_source, SOURCE_STEPS, "optimizer.main."))
    assert not tensors(tmp_path, end, "optimizer.main.")


def test_the_pretrained_checkpoint_serves_until_there_is_one_of_its_own(fp32_source: Path, tmp_path: Path) -> None:
    flags = f"--pretrained-checkpoint {fp32_source} --lr 0"
    load(tmp_path, tmp_path, f"{flags} --train-iters 2 --exit-interval 1")
    assert newest(tmp_path) == 1
    assert_all_equal(tensors(tmp_path, 1), tensors(fp32_source, SOURCE_STEPS))
    metrics = load(tmp_path, tmp_path, f"{flags} --train-iters 2")
    assert [step["iteration"] for step in steps(metrics)] == [1, 2]


# ------------------------------------------------------------------------------------------------------- the schedule


@pytest.fixture(scope="module")
def constant_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("constant")
    run(f"{MICRO} --lr 6e-4 --exit-interval 5 --save {folder} --save-interval 100")
    return folder


@pytest.mark.parametrize(
    ("flag", "share", "largest", "reported"),
    [
        pytest.param("--override-opt_param-scheduler", 0.5, 1e-4, False, id="override"),
        pytest.param("", 0.5, 1e-4, True, id="neither"),
        pytest.param("--use-checkpoint-opt_param-scheduler", 1.0, 6e-4, False, id="use-checkpoint"),
    ],
)
def test_which_schedule_a_resumed_run_follows(
    flag: str, share: float, largest: float, reported: bool, constant_source: Path, tmp_path: Path
) -> None:
    """A constant 6e-4 in the checkpoint, a cosine to 0 from 1e-4 on the command line, half way through."""
    metrics = tmp_path / "m.jsonl"
    flags = f"--lr 1e-4 --lr-decay-style cosine --load {constant_source} --metrics-file {metrics}"
    outcome = run(f"{MICRO} {flags} {flag}")
    assert steps(metrics)[0]["learning_rate"] == pytest.approx(largest * share, rel=1e-12)
    if share < 1:
        last = largest * 0.5 * (1 + math.cos(math.pi * 0.9))
        assert steps(metrics)[-1]["learning_rate"] == pytest.approx(last, rel=1e-12)
    lines = [line for line in outcome.out.splitlines() if "schedule" in line]
    assert len(lines) == reported
    if reported:
        assert "0.0006" in lines[0] and "0.0001" in lines[0] and "--override-opt_param-scheduler" in lines[0]


# -------------------------------------------------------------------------------------------------- the network's flags


def test_use_checkpoint_args_takes_the_network_and_the_command_line_wins(fp32_source: Path, tmp_path: Path) -> None:
    flags = f"{MICRO_RUN} --load {fp32_source} --use-checkpoint-args --train-iters {SOURCE_STEPS + 2} --lr 1e-2"
    run(f"{flags} --metrics-file {tmp_path}/a.jsonl")
    load(fp32_source, tmp_path, f"--train-iters {SOURCE_STEPS + 2} --lr 1e-2")
    assert written(tmp_path / "a.jsonl") == written(tmp_path / "m.jsonl")

    outcome = run(f"{flags} --hidden-dropout 0 --save {tmp_path}/b --save-interval 100")
    assert "--hidden-dropout 0.0 replaces the checkpoint's --hidden-dropout 0.1" in outcome.out
    stored = json.loads((checkpoint(tmp_path / "b", SOURCE_STEPS + 2) / "config.json").read_text())
    assert stored["model"]["hidden_dropout"] == 0.0
    assert stored["model"]["attention_dropout"] == 0.1
    assert stored["model"]["num_layers"] == 2 and stored["tokenizer"]["vocab_size"] == 46
