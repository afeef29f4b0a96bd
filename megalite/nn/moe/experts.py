"""The feed-forward blocks of a layer's experts.

Key idea: this rank's experts are one weight each for the first and the second product, [experts, ...], and the tokens
lie sorted by expert. So a product is one call for all experts, however many tokens each has, none too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.distributed.layout import EXPERT
from megalite.distributed.param_spec import Init, ParamSpec, cut_experts
from megalite.nn.gradients import GradientSink, WeightGradients, sink_of
from megalite.nn.mlp import Activation
from megalite.nn.module import Build, ShardedModule
from megalite.precision.products import Products


class _GroupedLinear(torch.autograd.Function):
    """Each group of rows times the transpose of its matrix. The weight's gradient goes to its sink, perhaps later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], products: Products, gradients: WeightGradients
    ) -> Tensor:
        # A frozen weight needs no input kept for its gradient.
        ctx.save_for_backward(weight, *([x] if ctx.needs_input_grad[1] else []))
        ctx.inputs = x.shape[-1]
        ctx.counts, ctx.products, ctx.gradients, ctx.sink = counts, products, gradients, sink_of(weight)
        return products.grouped_output(x, _matrices(weight, x.shape[-1]), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight, *kept), products, grad = ctx.saved_tensors, ctx.products, grads[0].contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = products.grouped_input_gradient(grad, _matrices(weight, ctx.inputs), ctx.counts)
        if kept and ctx.sink is None:
            weight_grad = torch.zeros_like(weight)
            products.add_grouped_weight_gradient(_matrices(weight_grad, ctx.inputs), grad, kept[0], ctx.counts)
        elif kept:
            job = partial(_fill, ctx.sink, products, grad, kept[0], ctx.counts)
            if ctx.gradients.deferred:
                ctx.gradients.jobs.append(job)
            else:
                job()
        return x_grad, weight_grad, None, None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], gradients: WeightGradients) -> Tensor:
    """`x` [n, in], so many rows of each group after one another, times the transposes of `weight` [groups, ..., in] as
    [groups, out, in]: [n, out]."""
    return cast(Tensor, _GroupedLinear.apply(x, weight, counts, Products(), gradients))


def _matrices(weight: Tensor, inputs: int) -> Tensor:
    """[experts, ..., in] as [experts, out, in]."""
    return weight.view(weight.shape[0], -1, inputs)


def _fill(sink: GradientSink, products: Products, grad: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    products.add_grouped_weight_gradient(_matrices(sink.target(), x.shape[-1]), grad, x, counts)


class ExpertLinear(ShardedModule):
    """A weight [experts, ..., in] of which `dim` is cut over expert-tensor-parallel ranks. `lora`: adds what is beside
    it, from the result, the input and the counts."""

    def __init__(self, build: Build, shape: tuple[int, ...], dim: int, init: Init):
        super().__init__()
        self.dim = dim
        self.lora: nn.Module | None = None
        place = build.place(domain=EXPERT)
        boxes = cut_experts(shape, dim, place)
        self.gradients = build.weight_gradients
        self.weight = self.add_parameter("weight", ParamSpec(shape, boxes[0].shape, boxes, init, domain=EXPERT), build)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """`x` [n, in], so many rows of each local expert after one another → [n, local out]."""
        y = grouped_linear(x, self.weight, counts, self.gradients)
        return y if self.lora is None else cast(Tensor, self.lora(y, x, counts))


class Experts(ShardedModule):
    """A layer's experts on this rank: `local` ones. Each has what `MLP` has, without biases."""

    def __init__(self, build: Build):
        super().__init__()
        config, layout = build.config, build.mesh.layout
        assert config.num_experts is not None and config.moe_ffn_hidden_size is not None
        experts, inner, hidden = config.num_experts, config.moe_ffn_hidden_size, config.hidden_size
        self.local = experts // layout.ep
        self.activation = Activation(build)
        shape, dim = ((experts, 2, inner, hidden), 2) if config.swiglu else ((experts, inner, hidden), 1)
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        self.linear_fc1 = ExpertLinear(build, shape, dim, Init(std=config.init_method_std))
        self.linear_fc2 = ExpertLinear(build, (experts, hidden, inner), 2, scaled)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """`x` [n, h], so many rows of each local expert after one another → [n, h], to be summed over the
        expert-tensor-parallel ranks."""
        return cast(Tensor, self.linear_fc2(self.activation(self.linear_fc1(x, counts)), counts))
