"""What DeepSeek-V2 and V3 have beside Llama: multi-latent attention (DeepSeek-AI 2024), and experts, which are refused.

Key idea: their latent vectors' norms have an epsilon that no field says, so only networks with that one are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megalite.checkpoint.huggingface.architecture import Same, read_same, write_same
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, same, stacked
from megalite.config.resolve import head_widths
from megalite.config.schema import ModelConfig

_OURS, _THEIRS = "decoder.layers.{n}.self_attention", "model.layers.{n}.self_attn"
_EPSILON = 1e-6

LATENT_NAMES: dict[str, Rule] = {
    f"{_OURS}.linear_q_proj.weight": stacked(f"{_THEIRS}.q_proj.weight"),
    f"{_OURS}.linear_q_down_proj.weight": same(f"{_THEIRS}.q_a_proj.weight"),
    f"{_OURS}.q_layernorm.weight": same(f"{_THEIRS}.q_a_layernorm.weight"),
    f"{_OURS}.linear_q_up_proj.weight": stacked(f"{_THEIRS}.q_b_proj.weight"),
    f"{_OURS}.linear_kv_down_proj.weight": same(f"{_THEIRS}.kv_a_proj_with_mqa.weight"),
    f"{_OURS}.kv_layernorm.weight": same(f"{_THEIRS}.kv_a_layernorm.weight"),
    f"{_OURS}.linear_kv_up_proj.weight": stacked(f"{_THEIRS}.kv_b_proj.weight"),
}

_SAME = {
    "kv_lora_rank": Same("kv_lora_rank", int, 512),
    "qk_nope_head_dim": Same("qk_head_dim", int, 128),
    "qk_rope_head_dim": Same("qk_pos_emb_head_dim", int, 64),
    "v_head_dim": Same("v_head_dim", int, 128),
}
_OF_EXPERTS = """
    aux_loss_alpha ep_size moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob
    num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef routed_scaling_factor scoring_func
    seq_aux topk_group topk_method
"""
_AHEAD = ("num_mtp_layers", "num_nextn_predict_layers")  # layers that language modelling doesn't use


class Differences(NamedTuple):
    """What an architecture adds to Llama's fields, as `families` takes it."""

    read: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


def differences(*, dense_layers: int, chooses_pairs: bool) -> Differences:
    """`dense_layers`: the default of `first_k_dense_replace`. `chooses_pairs`: whether a field says which channels are
    rotated together; else they are neighbours."""

    def read(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
        _read_experts(fields, shared["num_layers"], dense_layers)
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
            "first_k_dense_replace": model.num_layers,
        }
        return {**written, "rope_interleave": model.rotary_interleaved} if chooses_pairs else written

    return Differences(read, write)


def _read_experts(fields: Fields, layers: int, dense_layers: int) -> None:
    """Refuse layers with experts; without any the fields of experts mean nothing."""
    dense = fields.take("first_k_dense_replace", int, dense_layers, minimum=0)
    if dense < layers and fields.values.get("n_routed_experts", 1):
        fields.refuse("first_k_dense_replace", dense, f"routed experts aren't; all {layers} layers must be dense")
    fields.drop(*_OF_EXPERTS.split())
