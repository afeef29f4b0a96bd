"""Rotary positions as multiplication of complex numbers, and transformers' scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.nn.rotary import Rotation, rotary_table, rotary_width
from megalite.nn.tokens import Tokens, sequence_lengths
from tests.helpers import tiny_config

DOUBLE = torch.float64


def rope_config(width: int = 16, **overrides: Any) -> ModelConfig:
    return tiny_config(kv_channels=width, position_embedding_type="rope", **overrides)


def turned(x: Tensor, positions: Tensor, base: float, width: int, *, interleaved: bool) -> Tensor:
    """The first `width` channels of `x` [s, b, heads, d] as complex numbers, turned by position · base^(-2j/width)."""
    result = x.clone()
    half = width // 2
    for j in range(half):
        pair = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        angle = positions.t().to(DOUBLE)[:, :, None] * base ** (-2 * j / width)
        z = torch.complex(x[..., pair[0]], x[..., pair[1]]) * torch.polar(torch.ones_like(angle), angle)
        result[..., pair[0]], result[..., pair[1]] = z.real, z.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.45])
@pytest.mark.parametrize("base", [10000, 5e5])
def test_rotation_is_multiplication_by_a_unit_complex_number(interleaved: bool, share: float, base: float) -> None:
    config = rope_config(rotary_percent=share, rotary_base=base)
    width = {1.0: 16, 0.5: 8, 0.25: 4, 0.45: 6}[share]
    assert rotary_width(config) == width
    positions = torch.stack((torch.arange(20), torch.arange(20) % 7 + 100))
    x, cotangent = torch.randn(2, 20, 2, 3, 16, dtype=DOUBLE)
    x.requires_grad_()
    ours = Rotation(interleaved=interleaved)(x, rotary_table(config, Tokens.whole(positions), DOUBLE))
    theirs = turned(x, positions, base, width, interleaved=interleaved)
    assert torch.allclose(ours, theirs, atol=1e-12)
    gradients = [torch.autograd.grad(each, x, cotangent)[0] for each in (ours, theirs)]
    assert torch.allclose(*gradients, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_queries_and_keys_depend_on_their_distance_alone(interleaved: bool) -> None:
    config = rope_config()
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=DOUBLE)

    def product(query_position: int, key_position: int) -> Tensor:
        tables = [
            rotary_table(config, Tokens.whole(torch.tensor([[p]])), DOUBLE) for p in (query_position, key_position)
        ]
        turned_q, turned_k = (Rotation(interleaved=interleaved)(x, t) for x, t in zip((q, k), tables, strict=True))
        return (turned_q * turned_k).sum()

    assert torch.allclose(product(7, 3), product(1007, 1003), atol=1e-10)
    assert torch.allclose(product(0, 0), (q * k).sum(), atol=1e-12)


def test_each_token_belongs_to_a_sequence_of_its_own_length() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5, 0, 1]])  # the second padded
    expected = [[3, 3, 3, 2, 2, 5, 5, 5, 5, 5], [1, 1, 6, 6, 6, 6, 6, 6, 2, 2]]
    assert sequence_lengths(packed).tolist() == expected
    assert sequence_lengths(torch.tensor([[7], [3]])).tolist() == [[8], [4]]  # the rest is in a cache


LONGROPE = {
    "position_embedding_type": "longrope",
    "longrope_short_factor": [1.0] * 8,
    "longrope_long_factor": [3.0] * 8,
}


@pytest.mark.parametrize("scaling", [{"position_embedding_type": "dynamic"}, LONGROPE], ids=["dynamic", "longrope"])
def test_a_document_is_turned_alike_alone_and_packed_with_longer_ones(scaling: dict[str, Any]) -> None:
    config = tiny_config(kv_channels=16, rope_original_max_position_embeddings=10, **scaling)
    lengths = (4, 30, 10, 11, 1)
    alone = [torch.arange(length)[None] for length in lengths]
    packed = rotary_table(config, Tokens.whole(torch.cat(alone, dim=1)), DOUBLE)
    each = [rotary_table(config, Tokens.whole(positions), DOUBLE) for positions in alone]
    for part, whole in enumerate(packed):
        assert torch.equal(whole, torch.cat([table[part] for table in each]))
    assert not torch.allclose(each[3][0][:10], each[2][0])


def test_at_position_4000_the_fp32_table_is_exact_enough_and_a_bf16_one_would_not_be() -> None:
    config = rope_config(64)
    positions = torch.arange(4000, 4100)[None]
    exact = rotary_table(config, Tokens.whole(positions), DOUBLE)
    for ours, truth in zip(rotary_table(config, Tokens.whole(positions), torch.float32), exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - truth).abs().max() < 1e-3
    half = rotary_table(config, Tokens.whole(positions), torch.bfloat16)
    assert (half[0].double() - exact[0]).abs().max() > 0.5


@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_heads_are_turned_in_fp32_and_rounded_once(interleaved: bool) -> None:
    config = rope_config(64)
    positions = torch.arange(4000, 4100)[None]
    x = torch.randn(100, 1, 2, 64).bfloat16()
    ours = Rotation(interleaved=interleaved)(x, rotary_table(config, Tokens.whole(positions), torch.float32))
    assert ours.dtype == torch.bfloat16
    wide = Rotation(interleaved=interleaved)(
        x.to(torch.float32), rotary_table(config, Tokens.whole(positions), torch.float32)
    )
    assert torch.equal(ours, wide.bfloat16())
