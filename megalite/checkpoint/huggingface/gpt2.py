"""GPT-2 (Radford et al. 2019). Its linear layers are stored as [in, out], with all queries before all keys."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture, Same, attention_shape, read_same, write_same
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, same, stacked_qkv_transposed, transposed
from megalite.config.schema import ModelConfig

OURS, THEIRS = "decoder.layers.{n}", "transformer.h.{n}"

_NAMES: dict[str, Rule] = {
    "embedding.word_embeddings.weight": same("transformer.wte.weight"),
    "embedding.position_embeddings.weight": same("transformer.wpe.weight"),
    f"{OURS}.input_layernorm.weight": same(f"{THEIRS}.ln_1.weight"),
    f"{OURS}.input_layernorm.bias": same(f"{THEIRS}.ln_1.bias"),
    f"{OURS}.self_attention.linear_qkv.weight": stacked_qkv_transposed(f"{THEIRS}.attn.c_attn.weight"),
    f"{OURS}.self_attention.linear_qkv.bias": stacked_qkv_transposed(f"{THEIRS}.attn.c_attn.bias"),
    f"{OURS}.self_attention.linear_proj.weight": transposed(f"{THEIRS}.attn.c_proj.weight"),
    f"{OURS}.self_attention.linear_proj.bias": same(f"{THEIRS}.attn.c_proj.bias"),
    f"{OURS}.pre_mlp_layernorm.weight": same(f"{THEIRS}.ln_2.weight"),
    f"{OURS}.pre_mlp_layernorm.bias": same(f"{THEIRS}.ln_2.bias"),
    f"{OURS}.mlp.linear_fc1.weight": transposed(f"{THEIRS}.mlp.c_fc.weight"),
    f"{OURS}.mlp.linear_fc1.bias": same(f"{THEIRS}.mlp.c_fc.bias"),
    f"{OURS}.mlp.linear_fc2.weight": transposed(f"{THEIRS}.mlp.c_proj.weight"),
    f"{OURS}.mlp.linear_fc2.bias": same(f"{THEIRS}.mlp.c_proj.bias"),
    "decoder.final_layernorm.weight": same("transformer.ln_f.weight"),
    "decoder.final_layernorm.bias": same("transformer.ln_f.bias"),
    "output_layer.weight": same("lm_head.weight"),
}

# All of gelu_new, gelu_fast and gelu_pytorch_tanh are GELU's tanh approximation (Hendrycks and Gimpel 2016).
_ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu_new": {"openai_gelu": True},
    "gelu_fast": {"openai_gelu": True},
    "gelu_pytorch_tanh": {"openai_gelu": True},
    "gelu": {},
    "relu2": {"squared_relu": True},
}


_SAME = {
    "n_layer": Same("num_layers", int),
    "n_embd": Same("hidden_size", int),
    "n_positions": Same("max_position_embeddings", int),
    "layer_norm_epsilon": Same("norm_epsilon", float, 1e-5),
    "initializer_range": Same("init_method_std", float, 0.02),
    "resid_pdrop": Same("hidden_dropout", float, 0.1),
    "attn_pdrop": Same("attention_dropout", float, 0.1),
}


def _read(fields: Fields) -> dict[str, Any]:
    fields.drop("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation")
    fields.drop("summary_proj_to_labels", "summary_first_dropout")
    fields.choose("scale_attn_weights", (True,), True)
    fields.choose("scale_attn_by_inverse_layer_idx", (False,), False)
    result = read_same(fields, _SAME)
    hidden, dropout, heads = result["hidden_size"], result["hidden_dropout"], fields.take("n_head", int)
    embedding_dropout = fields.take("embd_pdrop", float, 0.1)
    if embedding_dropout != dropout:
        fields.refuse("embd_pdrop", embedding_dropout, f"it must equal resid_pdrop, which is {dropout}")
    return {
        **result,
        "ffn_hidden_size": fields.take("n_inner", int, 4 * hidden),
        **attention_shape(heads, heads, hidden // heads),
        "position_embedding_type": "learned_absolute",
        **_ACTIVATIONS[fields.choose("activation_function", tuple(_ACTIVATIONS), "gelu_new")],
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool, True),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_same(model, _SAME),
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu_new" if model.openai_gelu else "relu2" if model.squared_relu else "gelu",
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "embd_pdrop": model.hidden_dropout,
    }


_BUFFERS = (r"(.*\.)?attn\.bias", r"(.*\.)?attn\.masked_bias")  # causal masks that old versions stored
GPT2 = Architecture("gpt2", "GPT2LMHeadModel", "transformer.", _NAMES, _read, _write, _BUFFERS)
