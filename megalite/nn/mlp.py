"""The feed-forward block: GELU, squared ReLU, or gated SiLU (Shazeer 2020), cut by its inner width.

Key idea: gate and up are one weight [2, inner, hidden] cut along the inner width, so every rank holds matching halves
and the order knows no layout.
"""

from __future__ import annotations

import math

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


class MLP(ShardedModule):
    """[s, b, h] → [s, b, h]."""

    def __init__(self, build: Build):
        super().__init__()
        config, place = build.config, build.place()
        inner, hidden = config.ffn_hidden_size, config.hidden_size
        self.gated, self.gated_silu = config.swiglu, Differentiable(gated_silu, gated_silu_gradient, build.compile)
        self.squared_relu = config.squared_relu
        self.gelu = "tanh" if config.openai_gelu else "none"
        local = inner // place.tp
        shape, local_shape, dim = (inner, hidden), (local, hidden), 0
        if self.gated:
            shape, local_shape, dim = (2, inner, hidden), (2, local, hidden), 1  # type: ignore[assignment]
        bias_boxes = cut(shape[:-1], dim, place) if config.add_bias_linear else None
        init = Init(std=config.init_method_std)
        self.linear_fc1 = ColumnParallelLinear(build, shape, local_shape, cut(shape, dim, place), bias_boxes, init)
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        self.linear_fc2 = RowParallelLinear(build, inner, hidden, bias=config.add_bias_linear, init=scaled)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        y = self.linear_fc1(x, tokens)
        if self.gated:
            y = self.gated_silu(y)
        elif self.squared_relu:
            y = F.relu(y).square()
        else:
            y = F.gelu(y, approximate=self.gelu)
        return self.linear_fc2(y, tokens)
