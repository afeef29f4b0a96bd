"""What DeepSeek-V2 and V3 have beside Llama: multi-latent attention and experts (DeepSeek-AI 2024).

Key idea: their latent vectors' norms have an epsilon that no field says, so only networks with that one are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megalite.checkpoint.huggingface.architecture import Same, read_same, write_same
from megalite.checkpoint.huggingface.experts import TRAINING, expert_names, layer_pattern, shared_names
from megalite.checkpoint.huggingface.fields import REQUIRED, Fields
from megalite.checkpoint.huggingface.parts import Rule, same, stacked
from megalite.config.resolve import expert_layers, head_widths
from megalite.config.schema import ModelConfig

_OURS, _THEIRS = "decoder.layers.{n}.self_attention", "model.layers.{n}.self_attn"
_EPSILON = 1e-6

NAMES: dict[str, Rule] = {
    f"{_OURS}.linear_q_proj.weight": stacked(f"{_THEIRS}.q_proj.weight"),
    f"{_OURS}.linear_q_down_proj.weight": same(f"{_THEIRS}.q_a_proj.weight"),
    f"{_OURS}.q_layernorm.weight": same(f"{_THEIRS}.q_a_layernorm.weight"),
    f"{_OURS}.linear_q_up_proj.weight": stacked(f"{_THEIRS}.q_b_proj.weight"),
    f"{_OURS}.linear_kv_down_proj.weight": same(f"{_THEIRS}.kv_a_proj_with_mqa.weight"),
    f"{_OURS}.kv_layernorm.weight": same(f"{_THEIRS}.kv_a_layernorm.weight"),
    f"{_OURS}.linear_kv_up_proj.weight": stacked(f"{_THEIRS}.kv_b_proj.weight"),
    **expert_names("model.layers.{n}.mlp"),
    **shared_names("model.layers.{n}.mlp.shared_experts"),
    "decoder.layers.{n}.mlp.router.expert_bias": same("model.layers.{n}.mlp.gate.e_score_correction_bias"),
}

_SAME = {
    "kv_lora_rank": Same("kv_lora_rank", int, 512),
    "qk_nope_head_dim": Same("qk_head_dim", int, 128),
    "qk_rope_head_dim": Same("qk_pos_emb_head_dim", int, 64),
    "v_head_dim": Same("v_head_dim", int, 128),
}
_OF_EXPERTS = (
    *("moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob"),
    *("num_experts_per_tok", "routed_scaling_factor", "scoring_func", "topk_group", "topk_method"),
)
_AHEAD = ("num_mtp_layers", "num_nextn_predict_layers")  # layers that language modelling doesn't use


class Differences(NamedTuple):
    """What an architecture adds to Llama's fields, as `families` takes it."""

    read: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


class Router(NamedTuple):
    """How an architecture routes: by which scores, made to sum to one or not, `methods` by which it chooses, and of how
    many experts a group's score is the sum (`counted`). The rest are defaults of fields."""

    score: str
    normalizes: bool
    methods: tuple[str, ...]
    counted: int
    experts: int
    topk: Any
    width: int
    shared: int
    groups: int | None
    chosen_groups: int | None
    scaling: float
    dense_layers: int


V3 = Router("sigmoid", True, ("noaux_tc",), 2, 256, 8, 2048, 1, 8, 4, 2.5, 3)
V2 = Router("softmax", False, ("greedy", "group_limited_greedy"), 1, 64, REQUIRED, 1407, 2, None, None, 1.0, 0)


def differences(router: Router, *, chooses_pairs: bool) -> Differences:
    """`chooses_pairs`: whether a field says which channels are rotated together; else they are neighbours."""

    def read(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
        experts = _read_experts(fields, shared["num_layers"], router)
        fields.choose("attention_bias", (False,), False)
        fields.drop("auto_map", *_AHEAD)  # its own code is that of transformers by now
        result = read_same(fields, _SAME)
        result["q_lora_rank"] = fields.take("q_lora_rank", int, 1536, nullable=True)
        pairs = fields.take("rope_interleave", bool, True) if chooses_pairs else True
        network = ModelConfig(**result, multi_latent_attention=True)
        fields.choose("qk_head_dim", (head_widths(network)[0],), head_widths(network)[0])
        if shared["num_query_groups"] != shared["num_attention_heads"]:
            fields.refuse("num_key_value_heads", shared["num_query_groups"], "every head has keys of its own")
        if shared["norm_epsilon"] != _EPSILON:
            fields.refuse("rms_norm_eps", shared["norm_epsilon"], f"only {_EPSILON}, as the latent vectors' norms have")
        return {
            **result,
            **experts,
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "rotary_interleaved": pairs,
            "kv_channels": head_widths(network)[0],
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        written = {
            **write_same(model, _SAME),
            "q_lora_rank": model.q_lora_rank,
            "head_dim": model.qk_pos_emb_head_dim,
            "qk_head_dim": head_widths(model)[0],
            "attention_bias": False,
            **_write_experts(model, router),
        }
        return {**written, "rope_interleave": model.rotary_interleaved} if chooses_pairs else written

    return Differences(read, write)


def _read_experts(fields: Fields, layers: int, defaults: Router) -> dict[str, Any]:
    """Experts in all layers but the first ones, with shared ones. Without any the fields of experts mean nothing."""
    dense = fields.take("first_k_dense_replace", int, defaults.dense_layers, minimum=0)
    fields.drop(*TRAINING, "ep_size", "num_local_experts")
    if dense >= layers or not fields.values.get("n_routed_experts", 1):
        fields.drop(*_OF_EXPERTS)
        return {}
    fields.choose("moe_layer_freq", (1,), 1)
    fields.choose("scoring_func", (defaults.score,), defaults.score)
    fields.choose("norm_topk_prob", (defaults.normalizes,), defaults.normalizes)
    method = fields.choose("topk_method", defaults.methods, defaults.methods[0])
    width = fields.take("moe_intermediate_size", int, defaults.width)
    groups = fields.take("n_group", int, defaults.groups, nullable=True) or 1
    chosen = fields.take("topk_group", int, defaults.chosen_groups, nullable=True) or 1
    limited = method != "greedy" and chosen < groups
    return {
        "num_experts": fields.take("n_routed_experts", int, defaults.experts),
        "moe_router_topk": fields.take("num_experts_per_tok", int, defaults.topk),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * fields.take("n_shared_experts", int, defaults.shared),
        "moe_router_score_function": defaults.score,
        "moe_router_pre_softmax": defaults.score == "softmax",
        "moe_router_enable_expert_bias": defaults.score == "sigmoid",
        "moe_router_topk_scaling_factor": fields.take("routed_scaling_factor", float, defaults.scaling),
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_router_group_score_topk": defaults.counted if limited else None,
        "moe_layer_freq": layer_pattern([number >= dense for number in range(layers)]),
    }


def _write_experts(model: ModelConfig, defaults: Router) -> dict[str, Any]:
    if True not in (pattern := expert_layers(model)):
        return {"first_k_dense_replace": model.num_layers}
    groups, width = model.moe_router_num_groups, model.moe_ffn_hidden_size or 1
    return {
        "first_k_dense_replace": pattern.index(True),
        "moe_layer_freq": 1,
        "scoring_func": defaults.score,
        "norm_topk_prob": defaults.normalizes,
        "topk_method": defaults.methods[0 if groups is None else -1],
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "n_group": groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,  # 0 is none of these networks
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }
