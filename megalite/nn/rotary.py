"""Rotary positions (Su et al. 2021): halves or interleaved pairs, partial, scaled for longer sequences.

Key idea: angles, cosines and sines are computed in the wide dtype, and so is the rotation; only its result is rounded.
Where the scaling depends on the length, each token is rotated by the length of its own sequence, so that a document's
result doesn't depend on what else is in its row or microbatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.check_network import yarn_turns
from megalite.config.resolve import head_widths, rotated_head
from megalite.config.schema import ModelConfig
from megalite.nn.pure import Differentiable
from megalite.nn.tokens import Tokens


def rotary_width(config: ModelConfig) -> int:
    """How much of each head is rotated: an even number."""
    whole = rotated_head(config)
    assert whole is not None
    width = int(whole * config.rotary_percent)
    return width - width % 2


def scales_by_length(config: ModelConfig) -> bool:
    """Whether the frequencies depend on the length of the sequence."""
    return config.position_embedding_type in ("dynamic", "longrope")


def inverse_frequencies(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, lengths: Tensor | None = None
) -> Tensor:
    """Radians per position of each rotated pair, [rotary width / 2].

    Where the scaling depends on the length, [..., rotary width / 2] for `lengths` int64 [...] in tokens; without them,
    for short sequences.
    """
    width, kind = rotary_width(config), config.position_embedding_type
    exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / width
    if lengths is None:
        lengths = torch.ones((), dtype=torch.int64, device=device)
    if kind == "dynamic":
        return 1.0 / _dynamic_base(config, lengths.to(dtype))[..., None] ** exponents
    frequencies = 1.0 / (config.rotary_base**exponents)
    if kind == "yarn":
        return _yarn_scaling(frequencies, config)
    if kind == "longrope":
        return _longrope_scaling(frequencies, config, lengths)
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


def _dynamic_base(config: ModelConfig, lengths: Tensor) -> Tensor:
    """The base that grows with the length beyond the original one ("dynamic NTK"; Peng et al. 2023, section 3.3):
    the slowest pair is stretched by 1 + factor · (length / original - 1), the fastest not at all."""
    excess = (lengths / config.rope_original_max_position_embeddings - 1.0).clamp_min(0.0)
    width = rotary_width(config)
    return config.rotary_base * (1.0 + config.rope_scaling_factor * excess) ** (width / (width - 2))


def _yarn_scaling(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Divide low frequencies (pairs with few rotations) by the factor, leave high ones, and interpolate linearly in
    the pair's number between ("NTK by parts"; Peng et al. 2023, section 3.2)."""
    width, original = rotary_width(config), config.rope_original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (2 * math.pi * times)) / (2 * math.log(config.rotary_base))

    first, last = (pair_that_turns(times) for times in yarn_turns(config))
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
    stretched = ((pairs - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched + stretched / config.rope_scaling_factor)


def _longrope_scaling(frequencies: Tensor, config: ModelConfig, lengths: Tensor) -> Tensor:
    """Divide each pair's frequency by a factor of its own, searched for short and for long sequences (Ding et al.
    2024)."""
    factors = (getattr(config, f"longrope_{which}_factor") for which in ("short", "long"))
    short, long = (frequencies / frequencies.new_tensor(each) for each in factors)
    is_long = lengths > config.rope_original_max_position_embeddings
    return torch.where(is_long[..., None], long, short)


def attention_factor(config: ModelConfig) -> float:
    """What multiplies cosines and sines, so that its square multiplies the attention's scores (yarn: Peng et al.
    2023, section 3.4, and its weights from DeepSeek-V2's code; longrope: the code of Ding et al. 2024)."""
    kind, grown = config.position_embedding_type, math.log(config.rope_scaling_factor)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    if kind == "longrope":
        return math.sqrt(1.0 + grown / math.log(config.rope_original_max_position_embeddings))
    if config.yarn_mscale is None or config.yarn_mscale_all_dim is None:
        return 0.1 * grown + 1.0
    return (0.1 * config.yarn_mscale * grown + 1.0) / (0.1 * config.yarn_mscale_all_dim * grown + 1.0)


def score_scale(config: ModelConfig) -> float | None:
    """What multiplies the products of queries and keys; None: 1 / sqrt(width of a query). With multi-latent attention
    and yarn also the square of a factor that grows with the length (DeepSeek-V2's code)."""
    if not config.multi_latent_attention:
        return None
    scale = 1.0 / math.sqrt(head_widths(config)[0])
    if config.position_embedding_type != "yarn" or config.yarn_mscale_all_dim is None:
        return scale
    return scale * (0.1 * config.yarn_mscale_all_dim * math.log(config.rope_scaling_factor) + 1.0) ** 2


def rotary_table(config: ModelConfig, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, b or 1, 1, rotary width / 2] in `dtype` for the positions of `tokens`."""
    position_ids = tokens.positions
    lengths = tokens.reaches().t()[:, :, None] if scales_by_length(config) else None
    frequencies = inverse_frequencies(config, dtype, position_ids.device, lengths)
    angles = position_ids.t().to(dtype)[:, :, None, None] * frequencies
    factor = attention_factor(config)
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first part of each head of `x` [s, b, heads, d] by a table; the rest passes through."""
    half = cos.shape[-1]
    rotated, passed = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        result = torch.stack(pair, dim=-1).flatten(-2)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    result = result.to(x.dtype)
    return result if passed.shape[-1] == 0 else torch.cat((result, passed), dim=-1)


class Rotation:
    """Turns the heads of queries and keys. Its backward turns them back, and keeps nothing of its input."""

    def __init__(self, *, interleaved: bool, compile: bool = False):
        def forward(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            return turned(x, cos, sin, interleaved), cos, sin

        def backward(needed: tuple[bool, ...], grad: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
            return (turned(grad, cos, -sin, interleaved),)

        self._turn = Differentiable(forward, backward, compile)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [s, b, heads, d] by the `table` of `rotary_table`."""
        return self._turn(x, *table)
