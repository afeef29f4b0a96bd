"""Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.family import BUFFERS, NAMES, OURS, QKV_BIAS, THEIRS, read_family, write_family
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, gate_and_up, same
from megalite.config.schema import ModelConfig

_BIASES: dict[str, Rule] = {
    **QKV_BIAS,
    f"{OURS}.self_attention.linear_proj.bias": same(f"{THEIRS}.self_attn.o_proj.bias"),
    f"{OURS}.mlp.linear_fc1.bias": gate_and_up(f"{THEIRS}.mlp.gate_proj.bias", f"{THEIRS}.mlp.up_proj.bias"),
    f"{OURS}.mlp.linear_fc2.bias": same(f"{THEIRS}.mlp.down_proj.bias"),
}


def _read(fields: Fields) -> dict[str, Any]:
    attention, mlp = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
    if mlp and not attention:
        fields.refuse("mlp_bias", mlp, "mlp_bias needs attention_bias too")
    biases = {"add_bias_linear": mlp, "add_qkv_bias": attention, "add_proj_bias": attention and not mlp}
    return {**read_family(fields, groups=None, positions=2048), **biases}


def _write(model: ModelConfig) -> dict[str, Any]:
    attention = model.add_bias_linear or (model.add_qkv_bias and model.add_proj_bias)
    return {**write_family(model), "attention_bias": attention, "mlp_bias": model.add_bias_linear}


LLAMA = Architecture("llama", "LlamaForCausalLM", "model.", {**NAMES, **_BIASES}, _read, _write, BUFFERS)
