"""The FLOPs of a training step, against those of the matrix products that torch counts in one."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.resolve import resolve
from megalite.config.schema import ModelConfig
from megalite.distributed.launch import Environment
from megalite.distributed.mesh import single_process_mesh
from megalite.estimate.memory import estimate_memory
from megalite.peft.apply import Scale
from megalite.peft.modules import linear_shapes, linears_of, widths_of
from megalite.training.prepare import prepare_config
from megalite.training.run import build_run
from tests.peft.runs import adapter_config


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("none", {}),
        ("lora", {}),
        ("lora", {"lora_target_modules": ["q_proj,v_proj,down_proj"]}),
        ("prefix", {}),
    ],
    ids=["all", "lora", "lora beside some", "prefix"],
)
def test_a_step_costs_what_the_formula_says(kind: str, more: dict[str, Any]) -> None:
    config = resolve(adapter_config(kind, attention_backend="unfused", **more), 1)
    run = build_run(prepare_config(config, Environment()), single_process_mesh())
    model, length = config.model, config.data.seq_length
    counts = {torch.ops.aten.addmm_: _product}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        record = run.trainer.step()
    run.close()
    formula = run.model.flops_per_token(length)
    # The kernel multiplies the whole square, of which the formula counts the half below the diagonal.
    formula += 6.0 * model.num_layers * length * model.num_attention_heads * model.kv_channels
    # The embedding is frozen, so nothing asks for the gradient of the first layer's input, nor of queries without LoRA.
    if run.model.adapter is not None:
        formula -= 2.0 * sum(widths_of("q_proj", model)[0] * widths_of(part, model)[1] for part in _QKV)
        formula += 6.0 * model.num_layers * _zeros(run.model.adapter.scales, model)
        formula -= 2.0 * sum(
            run.model.adapter.scales[p].rank * widths_of(p, model)[0] for p in _QKV if p in run.model.adapter.scales
        )
    if kind == "prefix":
        attended = length + config.peft.num_virtual_tokens
        formula -= 2.0 * attended * model.num_attention_heads * model.kv_channels
    # The output layer leaves out tokens that don't count; where it is frozen, its weight's gradient too.
    output = (6.0 if kind == "none" else 4.0) * model.hidden_size * run.model.stages[0].vocab_size
    left_out = output * (1 - record.counted_tokens / record.consumed_tokens)
    assert counter.get_total_flops() / record.consumed_tokens == pytest.approx(formula - left_out, rel=1e-12)


def _product(into: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    """Of the product that is added to a weight's gradient, which torch doesn't count."""
    return 2 * a[0] * a[1] * b[1]


def _zeros(scales: dict[str, Scale], model: ModelConfig) -> int:
    """Of a layer: adapters beside one fused weight are one product, where each B is as high as all outputs."""
    result = 0
    for linear, shape in linear_shapes(model).items():
        ranks = {part: scale.rank for part, scale in scales.items() if linears_of(model)[part] == linear}
        outputs = sum(rank * widths_of(part, model)[1] for part, rank in ranks.items())
        result += sum(ranks.values()) * prod(shape[:-1]) - outputs
    return result


_QKV = ("q_proj", "k_proj", "v_proj")


def test_frozen_parameters_have_no_state_and_are_not_shared_out() -> None:
    config = resolve(adapter_config("lora", fp64=False, bf16=True), 1)
    config.layout.data_parallel_sharding_strategy = "optim_grads_params"
    whole, part = (estimate_memory(config, count, activations=0, ranks=4, frozen=count - 400) for count in (400, 1400))
    assert (part.main_gradients, part.main_parameters, part.moments) == (400, 400, 800)
    assert part.parameters == whole.parameters + 2000 == 2200
