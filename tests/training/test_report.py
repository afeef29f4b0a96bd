"""The memory that a run will take is told before there is a model, and is what it then takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megalite.config.errors import FlagError
from megalite.config.resolve import resolve
from megalite.distributed.launch import Environment
from megalite.estimate.memory import MemoryEstimate
from megalite.training import report
from megalite.training.prepare import prepare, prepare_config
from megalite.training.report import check_memory, memory_by_stage
from tests.peft.runs import adapter_config, build

COMMAND = (
    "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --device cpu --preset"
)


@pytest.mark.parametrize("peft", ["none", "lora", "prefix", "prompt"])
def test_what_is_predicted_without_a_model_is_what_the_model_then_holds(peft: str) -> None:
    prepared = prepare_config(resolve(adapter_config(peft), 1), Environment())
    (predicted,) = memory_by_stage(prepared.config, prepared.vocab_size, prepared.backend, 1, prepared.device)
    run = build(adapter_config(peft))
    run.close()
    parameters = [parameter for stage in run.model.stages for parameter in stage.parameters()]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    assert predicted.parameters == sum(parameter.nbytes for parameter in parameters)
    assert predicted.main_gradients == trained and predicted.moments == 2 * trained


def test_a_model_that_no_memory_here_can_hold_is_refused_before_it_is_built() -> None:
    with pytest.raises(FlagError, match=r"--num-layers.*tools/verify_parallel.py --shrink"):
        prepare(f"{COMMAND} gpt3-175b".split(), Environment(), program="", description="")


def test_activations_that_may_not_fit_are_a_warning_and_count_for_each_process_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "machine_memory", lambda: 100)
    monkeypatch.setattr(report, "free_machine_memory", lambda: 100)
    config, cpu = resolve(adapter_config("none"), 2), torch.device("cpu")
    rank = MemoryEstimate(1, 20, 5, 0, 20, activations=5)  # keeps 45, needs 50
    environment = Environment(0, 2, 0, 2)
    assert not any("warning" in line for line in check_memory([rank], config, environment, cpu))
    more = MemoryEstimate(1, 20, 5, 0, 20, activations=6)
    assert any(
        "2 processes of this machine may need 102 B" in s for s in check_memory([more], config, environment, cpu)
    )
    with pytest.raises(FlagError, match="2 processes of this machine need 102 B"):
        check_memory([MemoryEstimate(1, 20, 11, 0, 20, activations=0)], config, environment, cpu)


def test_a_gpu_is_warned_of_alone_and_not_for_what_the_host_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    config, gpu = resolve(adapter_config("none"), 2), torch.device("cuda", 0)
    rank, environment = MemoryEstimate(1, 30, 30, 20, 40, activations=5), Environment(0, 2, 0, 2)
    assert "warning: a GPU may need 125 B, and 100 B are there" in check_memory([rank], config, environment, gpu)[1]
    config.optimizer.optimizer_cpu_offload = True
    assert len(check_memory([rank], config, environment, gpu)) == 1
