"""The feed-forward block: GELU, squared ReLU, or gated SiLU (Shazeer 2020), cut by its inner width.

Key idea: gate and up are one weight [2, inner, hidden] cut along the inner width, so every rank holds matching halves
and the order knows no layout.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.param_spec import Init, cut
from megalite.nn.linear import ColumnParallelLinear, RowParallelLinear
from megalite.nn.module import Build, ShardedModule
from megalite.nn.tokens import Tokens


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up of [..., gate + up]. Keeps nothing but its input, and forms one gradient for both parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        gate_grad, up_grad = result.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=gate_grad)
        return result


class MLP(ShardedModule):
    """[s, b, h] → [s, b, h]."""

    def __init__(self, build: Build):
        super().__init__()
        config, place = build.config, build.place()
        inner, hidden = config.ffn_hidden_size, config.hidden_size
        self.gated = config.swiglu
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
            y = cast(Tensor, _GatedSilu.apply(y))
        elif self.squared_relu:
            y = F.relu(y).square()
        else:
            y = F.gelu(y, approximate=self.gelu)
        return self.linear_fc2(y, tokens)
