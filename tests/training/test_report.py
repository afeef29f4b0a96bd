"""The memory that a run will take is told before there is a model, and is what it then takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config.errors import FlagError
from megalite.config.resolve import resolve
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.estimate.memory import MemoryEstimate
from megalite.estimate.model import count_parameters
from megalite.training import report
from megalite.training.memory import PeakMemory, measured_step, predicted_step
from megalite.training.prepare import prepare, prepare_config
from megalite.training.report import check_memory, memory_by_stage, opening_block, predicted_memory
from tests.peft.runs import adapter_config, build, run_of

COMMAND = (
    "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --device cpu --preset"
)

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40}


@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("peft", ["none", "lora", "prefix", "prompt"])
def test_what_is_predicted_without_a_model_is_what_the_model_then_holds(peft: str, more: dict[str, Any]) -> None:
    prepared = prepare_config(resolve(adapter_config(peft, **more), 1), Environment())
    (predicted,) = memory_by_stage(prepared.config, prepared.vocab_size, prepared.backend, 1, prepared.device)
    run = build(adapter_config(peft, **more))
    run.close()
    parameters = [parameter for stage in run.model.stages for parameter in stage.parameters()]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    assert predicted.parameters == sum(parameter.nbytes for parameter in parameters)
    assert predicted.main_gradients == trained and predicted.moments == 2 * trained


def _held(mesh: Mesh, values: dict[str, dict[str, Any]]) -> tuple[dict[str, int], MemoryEstimate, int]:
    """Measured bytes, those predicted, and how many elements of buckets are padding."""
    run = run_of(mesh, values)
    kept: list[int] = []

    def measure(_: float) -> None:
        for products in run.model.scaling.layers.values():
            if (weight := products._weight) is not None:
                kept.append(weight.over_rows.data.nbytes)
                kept.append(0 if products.fp8.stores else weight.over_columns.data.nbytes)

    run.trainer.on_first_gradients = measure
    run.trainer.step()
    run.close()
    actions = run.engine.schedules.training(run.config.microbatches_per_step(mesh.dp.size))
    predicted = predicted_memory(run.config, run.model.stages, actions, mesh)
    padding = sum(b.size - sum(s.parameter.numel() for s in b.slots) for b in run.optimizer.buckets)
    return run.optimizer.held_bytes() | {"fp8": sum(kept)}, predicted, padding


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("stored", [False, True])
def test_weights_in_fp8_take_the_bytes_that_are_predicted(pool: ProcessPool, strategy: str, stored: bool) -> None:
    fields = {"fp64": False, "bf16": True, "fp8_format": "hybrid", "fp8_param_gather": stored}
    config = resolve(adapter_config("none", data_parallel_sharding_strategy=strategy, **fields), 2)
    for held, predicted, padding in pool.run(_held, 2, config.to_dict(), layout=Layout(dp=2)):
        assert held["fp8"] == predicted.fp8_weights
        assert (held["fp8"] == 0) == (strategy == "optim_grads_params")
        pairs = {
            "parameters": predicted.parameters,
            "gradients": predicted.main_gradients,
            "main": predicted.main_parameters,
            "moments": predicted.moments,
        }
        for kind, bytes_ in pairs.items():
            assert bytes_ <= held[kind] <= bytes_ + 8 * padding, kind


def _sent(mesh: Mesh, values: dict[str, dict[str, Any]]) -> tuple[str, int, int]:
    """Of one step: what data parallelism sent and what was predicted, as shown, and the bytes sent."""
    run = run_of(mesh, values)
    before = run.optimizer.transport.bytes_sent
    _, lines = measured_step(run.trainer)
    run.close()
    shown = next(line.split()[-2:] for line in lines if line.startswith("predicted"))
    return " ".join(shown), run.optimizer.transport.bytes_sent - before, sum(b.size for b in run.optimizer.buckets)


@pytest.mark.parametrize("stored", [False, True])
def test_parameters_are_sent_in_the_format_that_is_gathered(pool: ProcessPool, stored: bool) -> None:
    """Half of the fp32 gradients, and half of the parameters in bf16 or partly in FP8; padding is left out."""
    fields = {"fp64": False, "bf16": True, "fp8_format": "hybrid", "fp8_param_gather": stored}
    config = resolve(adapter_config("none", data_parallel_sharding_strategy="optim", **fields), 2)
    for shown, sent, elements in pool.run(_sent, 2, config.to_dict(), layout=Layout(dp=2)):
        number, unit = shown.split()
        predicted = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
        assert predicted == pytest.approx(sent, rel=0.05)
        assert (sent == (4 + 2) * elements / 2) != stored


ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}


def _with_experts(mesh: Mesh, values: dict[str, dict[str, Any]]) -> tuple[str, dict[str, tuple[int, int]], int]:
    """The lines about parameters and layout; bytes held, sent and of activations, predicted and real; padding."""
    run = run_of(mesh, values)
    line = "\n".join(opening_block(run.model, run.datasets, threads=1, iteration=0, of=1).splitlines()[1:5])
    before = run.optimizer.transport.bytes_sent
    with PeakMemory(mesh.device) as memory:
        run.trainer.step()
        run.optimizer.finish_gathers()
    held, sent = run.optimizer.held_bytes(), run.optimizer.transport.bytes_sent - before
    kinds = ("parameters", "gradients", "main", "moments", "activations", "sent")
    actual = [*(held[kind] for kind in kinds[:4]), memory.peak + run.optimizer.gatherer.peak_bytes, sent]
    pairs = dict(zip(kinds, zip(predicted_step(run.trainer), actual, strict=True), strict=True))
    run.close()
    return line, pairs, sum(b.size - sum(s.parameter.numel() for s in b.slots) for b in run.optimizer.buckets)


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        ({"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim", **ALL_TO_ALL}, 2),
        ({"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}, 4),
        ({"expert_tensor_parallel_size": 2, **ALL_TO_ALL}, 4),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}, 4),
        (
            {
                **{"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
                "data_parallel_sharding_strategy": "optim",
            },
            2,
        ),
    ],
    ids=["EP 2", "EP 2, alltoall, sharded", "EP 2, DP 4, sharded", "ETP 2, DP 4", "TP 2, DP 2", "TP 2, sharded"],
)
def test_experts_are_counted_and_shared_out_over_their_own_ranks(
    pool: ProcessPool, settings: dict[str, Any], world: int
) -> None:
    plain = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    length = {"seq_length": 128, "max_position_embeddings": 128}
    config = resolve(adapter_config("none", **EXPERTS, **length, **plain, **settings), world)
    count = count_parameters(config.model, 131)
    layout = Layout.from_config(config.layout, world)
    for line, pairs, padding in pool.run(_with_experts, world, config.to_dict(), layout=layout):
        assert f"parameters: {count.total:,} in all, {count.active:,} active" in line
        by = "" if layout.ep == layout.etp == 1 else f" by {config.model.moe_token_dispatcher_type}"
        assert f"experts EP {layout.ep} x ETP {layout.etp} x DP {layout.edp}{by}" in line
        predicted, actual = pairs.pop("activations")
        assert predicted == pytest.approx(actual, rel=0.15)
        for kind, (predicted, actual) in pairs.items():
            assert predicted <= actual <= predicted + 2 * 8 * padding, kind


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
