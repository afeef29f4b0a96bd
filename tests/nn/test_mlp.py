"""Every activation of the MLP against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.nn.mlp import MLP
from megalite.nn.module import initialize
from tests.helpers import tiny_build


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, torch.zeros_like(x))


CASES: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
    ({}, gelu),
    ({"openai_gelu": True}, gelu_tanh),
    ({"squared_relu": True}, squared_relu),
]


def random_mlp(**overrides: Any) -> MLP:
    mlp = MLP(tiny_build(init_method_std=0.5, **overrides))
    initialize(mlp, 3)
    with torch.no_grad():
        for layer in (mlp.linear_fc1, mlp.linear_fc2):
            if layer.bias is not None:
                layer.bias.copy_(torch.randn(layer.bias.shape))
    return mlp


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("flags", "activation"), CASES, ids=["gelu", "openai gelu", "squared relu"])
def test_the_mlp_is_two_products_around_its_activation(
    flags: dict[str, Any], activation: Callable[[Tensor], Tensor], bias: bool
) -> None:
    mlp = random_mlp(add_bias_linear=bias, **flags)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    x = torch.randn(3, 2, 32, dtype=torch.float64)
    inner = x @ first.weight.t() + (first.bias if bias else 0)
    expected = activation(inner) @ second.weight.t() + (second.bias if bias else 0)
    assert torch.allclose(mlp(x), expected, atol=1e-12)
    assert (first.bias is not None) == bias


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_is_the_sigmoid_gated_product_of_the_two_halves(bias: bool) -> None:
    mlp = random_mlp(add_bias_linear=bias, swiglu=True, ffn_hidden_size=48)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    assert first.weight.shape == (2, 48, 32)
    x, cotangent = torch.randn(2, 3, 2, 32, dtype=torch.float64)
    x.requires_grad_()
    gate, up = (x @ first.weight[i].t() + (first.bias[i] if bias else 0) for i in (0, 1))
    expected = (gate * torch.sigmoid(gate) * up) @ second.weight.t() + (second.bias if bias else 0)
    ours = mlp(x)
    assert torch.allclose(ours, expected, atol=1e-12)
    gradients = [torch.autograd.grad(each, (x, first.weight), cotangent) for each in (ours, expected)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))
