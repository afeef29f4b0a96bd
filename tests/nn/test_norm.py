"""Norms against their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.nn.module import initialize
from megalite.nn.norm import Norm
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, tiny_build

KINDS = ["LayerNorm", "RMSNorm"]


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centred: bool) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias; RMSNorm takes the mean as zero."""
    if centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return y if bias is None else y + bias


def norm(kind: str, precision: Precision = FP64, **overrides: Any) -> Norm:
    layer = Norm(tiny_build(precision, normalization=kind, **overrides), 16, partial=False)
    initialize(layer, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.5)
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
@pytest.mark.parametrize("plus_one", [False, True])
def test_values_and_gradients_follow_the_formula(kind: str, epsilon: float, plus_one: bool) -> None:
    layer = norm(kind, norm_epsilon=epsilon, apply_layernorm_1p=plus_one)
    x = torch.randn(5, 2, 16, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    weight = layer.weight + 1 if plus_one else layer.weight
    expected = formula(x, weight, layer.bias, epsilon, centred=kind == "LayerNorm")
    ours = layer(x)
    assert torch.allclose(ours, expected, atol=1e-13)
    cotangent = torch.randn_like(ours)
    pairs = zip(
        torch.autograd.grad(ours, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_takes_its_statistics_in_fp32(kind: str) -> None:
    """With a mean of 300 a bf16 variance would be wrong by far more than the rounding of the result."""
    layer, wide = norm(kind, BF16), norm(kind, FP32)
    with torch.no_grad():
        for half_parameter, wide_parameter in zip(layer.parameters(), wide.parameters(), strict=True):
            wide_parameter.copy_(half_parameter)
    x = (torch.randn(64, 16) * 4 + 300).bfloat16()
    ours, exact = layer(x), wide(x.to(torch.float32))
    assert ours.dtype == torch.bfloat16
    assert ((ours.to(torch.float32) - exact).abs() <= 2.0**-7 * exact.abs() + 2.0**-8).all()
