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
    if attention != mlp:
        fields.refuse("attention_bias", attention, f"it must equal mlp_bias, which is {mlp}: all biases or none")
    return {**read_family(fields, groups=None), "add_bias_linear": mlp, "add_qkv_bias": attention}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_family(model), "attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


LLAMA = Architecture("llama", "LlamaForCausalLM", "model.", {**NAMES, **_BIASES}, _read, _write, BUFFERS)
