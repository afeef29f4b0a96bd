"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.family import (
    BUFFERS,
    NAMES,
    QKV_BIAS,
    read_family,
    read_qwen_window,
    write_family,
    write_qwen_window,
)
from megalite.checkpoint.huggingface.fields import Fields
from megalite.config.schema import ModelConfig


def _read(fields: Fields) -> dict[str, Any]:
    result = {**read_family(fields, groups=32, positions=32768), "add_qkv_bias": True}
    return {**result, "window_size": read_qwen_window(fields, result["num_layers"])}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_family(model), **write_qwen_window(model)}


QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", "model.", {**NAMES, **QKV_BIAS}, _read, _write, BUFFERS)
