"""What Mixtral (Jiang et al. 2024), Qwen2-MoE and Qwen3-MoE (Yang et al. 2024, 2025) have in place of an MLP.

Key idea: their routers take the softmax over all experts. Where the chosen ones' weights are then made to sum to one,
that is a softmax over the chosen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, gate_and_up, gates_and_ups, halves_of_experts, of_experts, same
from megalite.config.resolve import expert_layers
from megalite.config.schema import ModelConfig

_OURS = "decoder.layers.{n}.mlp"
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux")
"""Fields that decide nothing in evaluation."""


def expert_names(theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Rule]:
    """Router and experts under `theirs`, with the names of an expert's matrices."""
    expert = f"{theirs}.experts.{{e}}"
    return {
        f"{_OURS}.router.weight": same(f"{theirs}.gate.weight"),
        f"{_OURS}.experts.linear_fc1.weight": gates_and_ups(f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        f"{_OURS}.experts.linear_fc2.weight": of_experts(f"{expert}.{down}.weight"),
    }


STACKED: dict[str, Rule] = {
    f"{_OURS}.router.weight": same("model.layers.{n}.mlp.gate.weight"),
    f"{_OURS}.experts.linear_fc1.weight": halves_of_experts("model.layers.{n}.mlp.experts.gate_up_proj"),
    f"{_OURS}.experts.linear_fc2.weight": same("model.layers.{n}.mlp.experts.down_proj"),
}
"""Names in transformers' memory, and in files if asked for: those of all experts are one tensor."""


def shared_names(theirs: str) -> dict[str, Rule]:
    """The experts that all tokens pass, one MLP under `theirs`."""
    halves = f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"
    return {
        f"{_OURS}.shared_experts.linear_fc1.weight": gate_and_up(*halves),
        f"{_OURS}.shared_experts.linear_fc2.weight": same(f"{theirs}.down_proj.weight"),
    }


def layer_pattern(has_experts: Sequence[bool]) -> str:
    """`--moe-layer-freq` for layers with and without experts."""
    return "1" if all(has_experts) else "[" + ",".join(str(int(each)) for each in has_experts) + "]"


def read_mixtral(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    fields.drop(*TRAINING)
    return {
        "num_experts": fields.take("num_local_experts", int, 8),
        "moe_router_topk": fields.take("num_experts_per_tok", int, 2),
        "moe_ffn_hidden_size": shared["ffn_hidden_size"],
    }


def write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.moe_ffn_hidden_size,
    }


def read_qwen(fields: Fields, shared: dict[str, Any], experts: int, topk: int, width: int) -> dict[str, Any]:
    """`experts`, `topk`, `width`: the architecture's defaults."""
    fields.drop(*TRAINING)
    step, layers = fields.take("decoder_sparse_step", int, 1), range(shared["num_layers"])
    dense = fields.take("mlp_only_layers", list, []) or []
    count = fields.take("num_local_experts" if "num_local_experts" in fields.values else "num_experts", int, experts)
    return {
        "num_experts": count,
        "moe_router_topk": fields.take("num_experts_per_tok", int, topk),
        "moe_ffn_hidden_size": fields.take("moe_intermediate_size", int, width),
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", bool, False),
        "moe_layer_freq": layer_pattern([n not in dense and (n + 1) % step == 0 for n in layers]),
    }


def write_qwen(model: ModelConfig) -> dict[str, Any]:
    dense = [n for n, has_experts in enumerate(expert_layers(model)) if not has_experts]
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
