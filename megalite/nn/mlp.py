"""The feed-forward block: GELU, squared ReLU, or gated SiLU (Shazeer 2020), cut by its inner width.

Key idea: gate and up are one weight [2, inner, hidden] cut along the inner width, so every rank holds matching halves
and the order knows no layout.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.param_spec import Init, cut
from megalite.nn.linear import ColumnParallelLinear, RowParallelLinear
from megalite.nn.module import Build, ShardedModule
from megalite.nn.pure import Differentiable
from megalite.nn.tokens import Tokens


def gated_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of [..., gate + up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up, x


def gated_silu_gradient(needed: tuple[bool, ...], grad: Tensor, x: Tensor) -> tuple[Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return (torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1),)


class Activation:
    """What lies between the two products: [..., inner] → [..., inner], or of gate and up [..., 2 inner]."""

    def __init__(self, build: Build):
        config = build.config
        self.gated, self.squared_relu = config.swiglu, config.squared_relu
        self.gelu = "tanh" if config.openai_gelu else "none"
        self.gated_silu = Differentiable(gated_silu, gated_silu_gradient, build.compile)

    def __call__(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.gated_silu(x)
        return F.relu(x).square() if self.squared_relu else F.gelu(x, approximate=self.gelu)


class MLP(ShardedModule):
    """[s, b, h] → [s, b, h]. `inner`: its width, where it isn't `--ffn-hidden-size`."""

    def __init__(self, build: Build, inner: int | None = None):
        super().__init__()
        config, place = build.config, build.place()
        inner, hidden = inner or config.ffn_hidden_size, config.hidden_size
        self.activation = Activation(build)
        local = inner // place.tp
        shape, local_shape, dim = (inner, hidden), (local, hidden), 0
        if config.swiglu:
            shape, local_shape, dim = (2, inner, hidden), (2, local, hidden), 1  # type: ignore[assignment]
        bias_boxes = cut(shape[:-1], dim, place) if config.add_bias_linear else None
        init = Init(std=config.init_method_std)
        self.linear_fc1 = ColumnParallelLinear(build, shape, local_shape, cut(shape, dim, place), bias_boxes, init)
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        self.linear_fc2 = RowParallelLinear(build, inner, hidden, bias=config.add_bias_linear, init=scaled)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return cast(Tensor, self.linear_fc2(self.activation(self.linear_fc1(x, tokens)), tokens))
