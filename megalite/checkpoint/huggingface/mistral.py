"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.family import (
    BUFFERS,
    NAMES,
    read_family,
    window_text,
    window_tokens,
    write_family,
)
from megalite.checkpoint.huggingface.fields import Fields
from megalite.config.schema import ModelConfig


def _read(fields: Fields) -> dict[str, Any]:
    window = fields.take("sliding_window", int, 4096, nullable=True)
    return {**read_family(fields, groups=8, positions=131072), "window_size": window_text(window)}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_family(model), "sliding_window": window_tokens(model)}


MISTRAL = Architecture("mistral", "MistralForCausalLM", "model.", NAMES, _read, _write, BUFFERS)
