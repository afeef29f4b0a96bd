"""GLM-4 (GLM team 2024), successor of ChatGLM: a part of each head rotated in neighbouring pairs, gate and up fused."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.family import BUFFERS, NAMES, OURS, QKV_BIAS, THEIRS, read_family, write_family
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, stacked
from megalite.config.schema import ModelConfig

_FUSED: dict[str, Rule] = {f"{OURS}.mlp.linear_fc1.weight": stacked(f"{THEIRS}.mlp.gate_up_proj.weight")}


def _read(fields: Fields) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, True)  # of queries, keys and values alone
    shared = read_family(fields, groups=2, positions=131072, head_dim=128, epsilon=1.5625e-07, partial=0.5)
    return {**shared, "add_qkv_bias": bias, "rotary_interleaved": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    written = {**write_family(model), "attention_bias": model.add_qkv_bias}
    return {**written, "partial_rotary_factor": model.rotary_percent}


GLM = Architecture("glm", "GlmForCausalLM", "model.", {**NAMES, **QKV_BIAS, **_FUSED}, _read, _write, BUFFERS)
