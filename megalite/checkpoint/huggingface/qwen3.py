"""Qwen3 (Yang et al. 2025): Llama with norms of each query and key head."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.family import (
    BUFFERS,
    NAMES,
    OURS,
    THEIRS,
    read_family,
    read_qwen_window,
    write_family,
    write_qwen_window,
)
from megalite.checkpoint.huggingface.fields import Fields
from megalite.checkpoint.huggingface.parts import Rule, same
from megalite.config.schema import ModelConfig

_NORMS: dict[str, Rule] = {
    f"{OURS}.self_attention.q_layernorm.weight": same(f"{THEIRS}.self_attn.q_norm.weight"),
    f"{OURS}.self_attention.k_layernorm.weight": same(f"{THEIRS}.self_attn.k_norm.weight"),
}


def _read(fields: Fields) -> dict[str, Any]:
    fields.choose("attention_bias", (False,), False)
    result = {**read_family(fields, groups=32, positions=32768, head_dim=128), "qk_layernorm": True}
    return {**result, "window_size": read_qwen_window(fields, result["num_layers"])}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_family(model), **write_qwen_window(model), "attention_bias": False}


QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", "model.", {**NAMES, **_NORMS}, _read, _write, BUFFERS)
