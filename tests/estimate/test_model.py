"""The FLOPs of a training step, against those of the matrix products that torch counts in one."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.resolve import head_widths, resolve
from megalite.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.mesh import single_process_mesh
from megalite.estimate.memory import estimate_memory
from megalite.estimate.model import count_parameters
from megalite.nn.module import named_specs
from megalite.peft.apply import Scale
from megalite.peft.modules import linear_shapes, linears_of, widths_of
from megalite.training.prepare import prepare_config
from megalite.training.run import build_run
from megalite.verify.layouts import Variant
from tests.helpers import FP64, LATENT, LLAMA, set_fields, tiny_model
from tests.peft.runs import adapter_config
from tests.verify.networks import network

EXPERTS = {"num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20, "moe_router_enable_expert_bias": True}
SHARED = {"moe_shared_expert_intermediate_size": 28, "moe_shared_expert_gate": True}


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
        formula -= 2.0 * sum(_widths("q_proj", model)[0] * _widths(part, model)[1] for part in _QKV)
        formula += 6.0 * model.num_layers * _zeros(run.model.adapter.scales, model)
        formula -= 2.0 * sum(
            run.model.adapter.scales[p].rank * _widths(p, model)[0] for p in _QKV if p in run.model.adapter.scales
        )
    if kind == "prefix":
        attended = length + config.peft.num_virtual_tokens
        formula -= 2.0 * attended * model.num_attention_heads * model.kv_channels
    # The output layer leaves out tokens that don't count; where it is frozen, its weight's gradient too.
    output = (6.0 if kind == "none" else 4.0) * model.hidden_size * run.model.stages[0].vocab_size
    left_out = output * (1 - record.counted_tokens / record.consumed_tokens)
    assert counter.get_total_flops() / record.consumed_tokens == pytest.approx(formula - left_out, rel=1e-12)


@pytest.mark.parametrize("latent", [False, True], ids=["grouped", "latent"])
def test_a_step_that_predicts_further_tokens_costs_what_the_formula_says(latent: bool) -> None:
    config = network(Variant(), tied=False, llama=True, latent=latent, ahead=2, precision=PrecisionConfig(fp64=True))
    _assert_formula_is_counted(config, depths=2)


def _assert_formula_is_counted(config: RunConfig, *, depths: int) -> None:
    """A step's FLOPs are those of the formula. `depths`: of multi-token prediction."""
    config.model.attention_backend = "unfused"
    config.data.eod_mask_loss = config.data.reset_attention_mask = config.data.reset_position_ids = False
    run = build_run(prepare_config(resolve(config, 1), Environment()), single_process_mesh())
    model, length = run.model.config.model, run.model.config.data.seq_length
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product}) as counter:
        record = run.trainer.step()
    run.close()
    formula = run.model.flops_per_token(length)
    # As above, the whole square; and the last tokens have none so far ahead.
    formula += 3.0 * (model.num_layers + depths) * length * model.num_attention_heads * sum(head_widths(model))
    missing = sum(range(1, depths + 1))
    formula -= 6.0 * model.hidden_size * run.model.stages[0].vocab_size * missing / length
    assert record.counted_tokens == record.consumed_tokens
    assert counter.get_total_flops() / record.consumed_tokens == pytest.approx(formula, rel=1e-12)


def _product(into: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    """Of the product that is added to a weight's gradient, which torch doesn't count."""
    return 2 * a[0] * a[1] * b[1]


def _zeros(scales: dict[str, Scale], model: ModelConfig) -> int:
    """Of a layer: adapters beside one fused weight are one product, where each B is as high as all outputs."""
    result = 0
    for linear, shape in linear_shapes(model).items():
        ranks = {part: scale.rank for part, scale in scales.items() if linears_of(model, 0)[part] == linear}
        outputs = sum(rank * _widths(part, model)[1] for part, rank in ranks.items())
        result += sum(ranks.values()) * prod(shape[:-1]) - outputs
    return result


def _widths(part: str, model: ModelConfig) -> tuple[int, int]:
    """Inputs and outputs of a target in a network without experts."""
    return widths_of(part, linears_of(model, 0)[part], model)


_QKV = ("q_proj", "k_proj", "v_proj")


def test_frozen_parameters_have_no_state_and_are_not_shared_out() -> None:
    config = resolve(adapter_config("lora", fp64=False, bf16=True), 1)
    config.layout.data_parallel_sharding_strategy = "optim_grads_params"
    whole, part = (estimate_memory(config, count, activations=0, ranks=4, frozen=count - 400) for count in (400, 1400))
    assert (part.main_gradients, part.main_parameters, part.moments) == (400, 400, 800)
    assert part.parameters == whole.parameters + 2000 == 2200


@pytest.mark.parametrize(
    "network",
    [
        {},
        LLAMA,
        {**LLAMA, "qk_layernorm": True, "add_proj_bias": True, "mtp_num_layers": 2},
        {"position_embedding_type": "rope", "mtp_num_layers": 1, "qk_layernorm": True},
        LATENT,
        {**LATENT, "q_lora_rank": None, "qk_layernorm": False, "add_bias_linear": True, "mtp_num_layers": 3},
    ],
    ids=["gpt2", "llama", "llama, 2 ahead", "gpt2, 1 ahead", "latent", "latent, other settings, 3 ahead"],
)
def test_the_parameters_are_those_of_the_model_that_is_built(network: dict[str, Any]) -> None:
    model = tiny_model(single_process_mesh(), FP64, **network)
    built = sum(prod(spec.shape) for _, _, spec in named_specs(model))
    count = count_parameters(model.config, model.vocab_size)
    assert count.total == count.active == built


@pytest.mark.parametrize(
    "network",
    [
        {**LLAMA, **EXPERTS},
        {**LLAMA, **EXPERTS, **SHARED, "moe_layer_freq": "[0,1]", "mtp_num_layers": 2},
        {**LATENT, **EXPERTS, **SHARED, "moe_layer_freq": "2", "mtp_num_layers": 1},
        {**EXPERTS, "add_bias_linear": False, "moe_router_load_balancing_type": ["global_aux_loss"]},
    ],
    ids=["all layers", "the last and 2 ahead", "the first", "gpt2"],
)
def test_a_token_uses_the_parameters_of_its_experts(network: dict[str, Any]) -> None:
    model = tiny_model(single_process_mesh(), FP64, **network)
    built = {name: prod(spec.shape) for name, p, spec in named_specs(model) if p.requires_grad}
    routed = sum(size for name, size in built.items() if ".mlp.experts." in name)
    count = count_parameters(model.config, model.vocab_size)
    assert count.total == sum(built.values())
    assert count.active == count.total - routed + routed * EXPERTS["moe_router_topk"] // EXPERTS["num_experts"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_with_experts_costs_what_the_formula_says(shared: bool) -> None:
    config = network(Variant(pp=2), tied=False, llama=True, ahead=1, precision=PrecisionConfig(fp64=True))
    set_fields(config, **EXPERTS, **(SHARED if shared else {}), moe_layer_freq="[0,1]")
    _assert_formula_is_counted(config, depths=1)
