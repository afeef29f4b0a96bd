"""Rotary positions (Su et al. 2021): halves or interleaved pairs, partial, scaled as Llama 3.1 or linearly.

Key idea: angles, cosines and sines are computed in the wide dtype, and so is the rotation; only its result is rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig


def rotary_width(config: ModelConfig) -> int:
    """How much of each head is rotated: an even number."""
    assert config.kv_channels is not None
    width = int(config.kv_channels * config.rotary_percent)
    return width - width % 2


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, [rotary width / 2]."""
    width = rotary_width(config)
    exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / width
    frequencies = 1.0 / (config.rotary_base**exponents)
    if config.use_rope_scaling:
        frequencies = _llama3_scaling(frequencies, config)
    if config.rotary_seq_len_interpolation_factor is not None:
        frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    return frequencies


def _llama3_scaling(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Divide low frequencies by the factor, leave high ones, blend between (Llama 3.1 model card and code)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    blend = ((config.rope_original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / config.rope_scaling_factor)


def rotary_table(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, b or 1, 1, rotary width / 2] in `dtype` for `position_ids` [b or 1, s]."""
    frequencies = inverse_frequencies(config, dtype, position_ids.device)
    angles = position_ids.t().to(dtype)[:, :, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Rotate the first part of each head of `x` [s, b, heads, d]; the rest passes through."""
    cos, sin = table
    half = cos.shape[-1]
    turned, passed = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        result = torch.stack(pair, dim=-1).flatten(-2)
    else:
        first, second = turned[..., :half], turned[..., half:]
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    result = result.to(x.dtype)
    return result if passed.shape[-1] == 0 else torch.cat((result, passed), dim=-1)
