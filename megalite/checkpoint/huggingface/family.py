"""What Llama and its relatives (Mistral, Qwen, GLM) share: names, configuration fields, sliding windows."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import attention_shape
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, gate_and_up, same, split_qkv
from megalite.checkpoint.huggingface.rope import read_rope, write_rope
from megalite.config.schema import ModelConfig
from megalite.nn.attention_backend import bounded_window

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"

NAMES: dict[str, Rule] = {
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

QKV_BIAS: dict[str, Rule] = {
    f"{OURS}.self_attention.linear_qkv.bias": split_qkv(f"{THEIRS}.self_attn.{{x}}_proj.bias"),
}

BUFFERS = (r".*rotary_emb\.inv_freq",)

_ALIKE = {
    "num_hidden_layers": ("num_layers", int),
    "hidden_size": ("hidden_size", int),
    "intermediate_size": ("ffn_hidden_size", int),
}


def read_family(
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
    result: dict[str, Any] = {ours: fields.take(name, kind) for name, (ours, kind) in _ALIKE.items()}
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
        "init_method_std": fields.take("initializer_range", float, 0.02),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", float, 0.0),
    }


def write_family(model: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that `read_family` reads."""
    return {
        **{name: getattr(model, ours) for name, (ours, _) in _ALIKE.items()},
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.rope_original_max_position_embeddings  # the one length that it has there
        if model.position_embedding_type == "dynamic"
        else model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        **write_rope(model),
    }


def window_text(window: int | None) -> str | None:
    """transformers counts the token itself into its window, `--window-size` does not."""
    return None if window is None else f"{window - 1},0"


def window_tokens(model: ModelConfig) -> int | None:
    """The inverse."""
    window = bounded_window(model)
    return None if window is None else window + 1


def read_qwen_window(fields: Fields, layers: int) -> str | None:
    """`window_size` from Qwen's four fields. A window on some layers only is refused."""
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 4096, nullable=True)
    first = fields.take("max_window_layers", int, 28, minimum=0)
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        kinds = ["sliding_attention" if used and window and n >= first else "full_attention" for n in range(layers)]
    if all(kind == "full_attention" for kind in kinds):
        return None
    if used and window and all(kind == "sliding_attention" for kind in kinds):
        return window_text(window)
    fields.refuse("layer_types", sorted(set(kinds)), "only the same attention on all layers is")


def write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    """Qwen's fields."""
    window = window_tokens(model)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.num_layers if window is None else 0,
    }
