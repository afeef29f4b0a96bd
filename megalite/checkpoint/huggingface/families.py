"""Llama and its relatives (Mistral, Qwen, GLM, DeepSeek), and with GPT-2 all architectures that can be read and
written.

Key idea: a relative is what all of them share (names, configuration fields) and a few lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.checkpoint.huggingface.architecture import (
    Architecture,
    Same,
    attention_shape,
    read_same,
    write_same,
)
from megalite.checkpoint.huggingface.deepseek import NAMES as DEEPSEEK_NAMES
from megalite.checkpoint.huggingface.deepseek import V2, V3, differences
from megalite.checkpoint.huggingface.experts import (
    STACKED,
    expert_names,
    read_mixtral,
    read_qwen,
    shared_names,
    write_mixtral,
    write_qwen,
)
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.gpt2 import GPT2
from megalite.checkpoint.huggingface.parts import Rule, gate_and_up, same, split_qkv, stacked
from megalite.checkpoint.huggingface.rope import read_rope, write_rope
from megalite.config.schema import ModelConfig
from megalite.nn.attention_backend import bounded_window

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"

_NAMES: dict[str, Rule] = {
    "embedding.word_embeddings.weight": same("model.embed_tokens.weight"),
    f"{OURS}.input_layernorm.weight": same(f"{THEIRS}.input_layernorm.weight"),
    f"{OURS}.self_attention.linear_qkv.weight": split_qkv(f"{THEIRS}.self_attn.{{x}}_proj.weight"),
    f"{OURS}.self_attention.linear_proj.weight": same(f"{THEIRS}.self_attn.o_proj.weight"),
    f"{OURS}.pre_mlp_layernorm.weight": same(f"{THEIRS}.post_attention_layernorm.weight"),
    f"{OURS}.mlp.linear_fc1.weight": gate_and_up(f"{THEIRS}.mlp.gate_proj.weight", f"{THEIRS}.mlp.up_proj.weight"),
    f"{OURS}.mlp.linear_fc2.weight": same(f"{THEIRS}.mlp.down_proj.weight"),
    "decoder.final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": same("lm_head.weight"),
}

_QKV_BIAS: dict[str, Rule] = {
    f"{OURS}.self_attention.linear_qkv.bias": split_qkv(f"{THEIRS}.self_attn.{{x}}_proj.bias"),
}
_ALL_BIASES: dict[str, Rule] = {
    **_QKV_BIAS,
    f"{OURS}.self_attention.linear_proj.bias": same(f"{THEIRS}.self_attn.o_proj.bias"),
    f"{OURS}.mlp.linear_fc1.bias": gate_and_up(f"{THEIRS}.mlp.gate_proj.bias", f"{THEIRS}.mlp.up_proj.bias"),
    f"{OURS}.mlp.linear_fc2.bias": same(f"{THEIRS}.mlp.down_proj.bias"),
}
_QK_NORMS: dict[str, Rule] = {
    f"{OURS}.self_attention.q_layernorm.weight": same(f"{THEIRS}.self_attn.q_norm.weight"),
    f"{OURS}.self_attention.k_layernorm.weight": same(f"{THEIRS}.self_attn.k_norm.weight"),
}

_SAME = {
    "num_hidden_layers": Same("num_layers", int),
    "hidden_size": Same("hidden_size", int),
    "intermediate_size": Same("ffn_hidden_size", int),
    "initializer_range": Same("init_method_std", float, 0.02),
    "attention_dropout": Same("attention_dropout", float, 0.0),
}


def _read_shared(
    fields: Fields,
    *,
    groups: int | None,
    positions: int,
    head_dim: int | None = None,
    epsilon: float = 1e-6,
    partial: float | None = None,
) -> dict[str, Any]:
    """Fields of `ModelConfig`, without biases, QK norm and window.

    `groups`, `positions`, `head_dim`, `epsilon`, `partial`: the architecture's defaults; None: as many as heads, hidden
    / heads, and no partial rotation.
    """
    result = read_same(fields, _SAME)
    heads = fields.take("num_attention_heads", int)
    fields.choose("hidden_act", ("silu", "swish"), "silu")
    width = fields.take("head_dim", int, head_dim, nullable=True) or result["hidden_size"] // heads
    result |= attention_shape(heads, fields.take("num_key_value_heads", int, groups, nullable=True), width)
    positions = fields.take("max_position_embeddings", int, positions)
    result |= read_rope(fields, positions=positions, partial=partial)
    return result | {
        "max_position_embeddings": positions,
        "normalization": "RMSNorm",
        "norm_epsilon": fields.take("rms_norm_eps", float, epsilon),
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool, False),
        "hidden_dropout": 0.0,
    }


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that `_read_shared` reads."""
    return {
        **write_same(model, _SAME),
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.rope_original_max_position_embeddings  # the one length that it has there
        if model.position_embedding_type == "dynamic"
        else model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **write_rope(model),
    }


def _relative(
    model_type: str,
    class_name: str,
    names: Mapping[str, Rule],
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]],
    write: Callable[[ModelConfig], dict[str, Any]],
    **defaults: Any,
) -> Architecture:
    """An architecture that shares the rest with Llama. `names`, `read`, `write`: what it adds, as in `Architecture`;
    `read` also gets what was read so far. `defaults`: those of `_read_shared`."""

    def read_all(fields: Fields) -> dict[str, Any]:
        shared = _read_shared(fields, **defaults)
        return shared | read(fields, shared)

    def write_all(model: ModelConfig) -> dict[str, Any]:
        return _write_shared(model) | write(model)

    buffers = (r".*rotary_emb\.inv_freq",)
    others = {name: rule for name, rule in STACKED.items() if name in names}
    return Architecture(model_type, class_name, "model.", {**_NAMES, **names}, read_all, write_all, buffers, others)


def _window_text(window: int | None) -> str | None:
    """transformers counts the token itself into its window, `--window-size` does not."""
    return None if window is None else f"{window - 1},0"


def _window_tokens(model: ModelConfig) -> int | None:
    """The inverse."""
    window = bounded_window(model)
    return None if window is None else window + 1


def _read_biases(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    attention, mlp = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
    if mlp and not attention:
        fields.refuse("mlp_bias", mlp, "mlp_bias needs attention_bias too")
    return {"add_bias_linear": mlp, "add_qkv_bias": attention, "add_proj_bias": attention and not mlp}


def _write_biases(model: ModelConfig) -> dict[str, Any]:
    attention = model.add_bias_linear or (model.add_qkv_bias and model.add_proj_bias)
    return {"attention_bias": attention, "mlp_bias": model.add_bias_linear}


def _read_qwen_window(
    fields: Fields, shared: dict[str, Any], slides: Callable[[int, int], bool] = lambda n, first: n >= first
) -> dict[str, Any]:
    """`window_size` from Qwen's four fields. A window on some layers only is refused. `slides`: whether layer n has one
    by max_window_layers, where `layer_types` doesn't say."""
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 4096, nullable=True, minimum=0)
    first = fields.take("max_window_layers", int, 28, minimum=0)
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        layers = range(shared["num_layers"])
        kinds = ["sliding_attention" if used and window and slides(n, first) else "full_attention" for n in layers]
    if all(kind == "full_attention" for kind in kinds):
        return {"window_size": None}
    if used and window and all(kind == "sliding_attention" for kind in kinds):
        return {"window_size": _window_text(window)}
    fields.refuse("layer_types", sorted(set(kinds)), "only the same attention on all layers is")


def _write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    window = _window_tokens(model)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.num_layers if window is None else 0,
    }


def _slides_in_qwen2_moe(n: int, first: int) -> bool:
    return n % 2 == 0 and n < first


def _read_qwen3_moe(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """All layers of Qwen3-MoE have the window, whatever max_window_layers says."""
    fields.drop("max_window_layers")
    fields.choose("attention_bias", (False,), False)
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 4096, nullable=True, minimum=0)
    text = _window_text(window) if used and window else None
    return {"qk_layernorm": True, "window_size": text, **read_qwen(fields, shared, 128, 8, 768)}


def _read_qwen3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    fields.choose("attention_bias", (False,), False)
    return {"qk_layernorm": True, **_read_qwen_window(fields, shared)}


# Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024).
_LLAMA = _relative("llama", "LlamaForCausalLM", _ALL_BIASES, _read_biases, _write_biases, groups=None, positions=2048)

# Mistral (Jiang et al. 2023): Llama with a sliding window.
_MISTRAL = _relative(
    "mistral",
    "MistralForCausalLM",
    {},
    lambda fields, _: {"window_size": _window_text(fields.take("sliding_window", int, 4096, nullable=True))},
    lambda model: {"sliding_window": _window_tokens(model)},
    groups=8,
    positions=131072,
)

# Qwen2 and Qwen2.5 (Yang et al. 2024): biases of queries, keys and values.
_QWEN2 = _relative(
    "qwen2",
    "Qwen2ForCausalLM",
    _QKV_BIAS,
    lambda fields, shared: {"add_qkv_bias": True, **_read_qwen_window(fields, shared)},
    _write_qwen_window,
    groups=32,
    positions=32768,
)

# Qwen3 (Yang et al. 2025): norms of each query and key head.
_QWEN3 = _relative(
    "qwen3",
    "Qwen3ForCausalLM",
    _QK_NORMS,
    _read_qwen3,
    lambda model: {**_write_qwen_window(model), "attention_bias": False},
    groups=32,
    positions=32768,
    head_dim=128,
)

# Mixtral (Jiang et al. 2024): Mistral with experts.
_MIXTRAL = _relative(
    "mixtral",
    "MixtralForCausalLM",
    expert_names(f"{THEIRS}.block_sparse_moe", "w1", "w3", "w2"),
    lambda fields, shared: {
        "window_size": _window_text(fields.take("sliding_window", int, None, nullable=True)),
        **read_mixtral(fields, shared),
    },
    lambda model: {"sliding_window": _window_tokens(model), **write_mixtral(model)},
    groups=8,
    positions=131072,
    epsilon=1e-5,
)

# Qwen2-MoE and Qwen3-MoE: experts in the layers of Qwen2, with shared ones behind a gate, and of Qwen3.
_QWEN2_MOE = _relative(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        **_QKV_BIAS,
        **expert_names(f"{THEIRS}.mlp"),
        **shared_names(f"{THEIRS}.mlp.shared_expert"),
        f"{OURS}.mlp.shared_experts.gate_weight": same(f"{THEIRS}.mlp.shared_expert_gate.weight"),
    },
    lambda fields, shared: {
        "add_qkv_bias": fields.take("qkv_bias", bool, True),
        "moe_shared_expert_intermediate_size": fields.take("shared_expert_intermediate_size", int, 5632),
        "moe_shared_expert_gate": True,
        **read_qwen(fields, shared, 60, 4, 1408),
        **_read_qwen_window(fields, shared, _slides_in_qwen2_moe),
    },
    lambda model: {
        "qkv_bias": model.add_qkv_bias,
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        **write_qwen(model),
        **_write_qwen_window(model),
        "layer_types": ["full_attention" if bounded_window(model) is None else "sliding_attention"] * model.num_layers,
    },
    groups=16,
    positions=32768,
)
_QWEN3_MOE = _relative(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**_QK_NORMS, **expert_names(f"{THEIRS}.mlp")},
    _read_qwen3_moe,
    lambda model: {
        **write_qwen(model),
        "use_sliding_window": bounded_window(model) is not None,
        "sliding_window": _window_tokens(model),
        "attention_bias": False,
    },
    groups=4,
    positions=32768,
)

# GLM-4 (GLM team 2024), successor of ChatGLM: a part of each head rotated in neighbouring pairs, gate and up fused; its
# attention_bias is of queries, keys and values alone.
_GLM = _relative(
    "glm",
    "GlmForCausalLM",
    {**_QKV_BIAS, f"{OURS}.mlp.linear_fc1.weight": stacked(f"{THEIRS}.mlp.gate_up_proj.weight")},
    lambda fields, _: {"add_qkv_bias": fields.take("attention_bias", bool, True), "rotary_interleaved": True},
    lambda model: {"attention_bias": model.add_qkv_bias, "partial_rotary_factor": model.rotary_percent},
    groups=2,
    positions=131072,
    head_dim=128,
    epsilon=1.5625e-07,
    partial=0.5,
)

# DeepSeek-V3 and V2 (DeepSeek-AI 2024): multi-latent attention.
_DEEPSEEK_V3 = _relative(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DEEPSEEK_NAMES,
    *differences(V3, chooses_pairs=True),
    groups=None,
    positions=4096,
)
_DEEPSEEK_V2 = _relative(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    DEEPSEEK_NAMES,
    *differences(V2, chooses_pairs=False),
    groups=None,
    positions=2048,
)

_DENSE = GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GLM
_ALL = *_DENSE, _MIXTRAL, _QWEN3_MOE, _QWEN2_MOE, _DEEPSEEK_V3, _DEEPSEEK_V2
ARCHITECTURES = {one.model_type: one for one in _ALL}
"""By `model_type`; where several can express a network, the first is written."""
