"""Column- and row-parallel linear layers (Shoeybi et al. 2019).

Key idea: the weight's gradient is accumulated straight into the wide main gradient (`weight.main_grad`, set by the
optimizer's buffers) by the GEMM that computes it, so no half-precision sum and no second buffer ever exists. Without a
main gradient the layer is an ordinary one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.collectives import copy_to_group, reduce_from_group
from megalite.distributed.param_spec import ZEROS, Box, Init, ParamSpec, cut, replicated
from megalite.nn.module import Build, ShardedModule


def accumulate_weight_gradient(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """main_grad += grad^T x: grad [tokens, out] and x [tokens, in] in the compute dtype, main_grad [out, in] wide."""
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), x)
    else:
        main_grad.add_(grad.t() @ x)


class _Linear(torch.autograd.Function):
    """x W^T; the weight's gradient goes to `weight.main_grad` where there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.view(-1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        matrix = weight.view(-1, x.shape[-1])
        x_grad = grad @ matrix if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                weight_grad = (flat_grad.t() @ flat_x).view_as(weight)
            else:
                accumulate_weight_gradient(main_grad.view_as(matrix), flat_grad, flat_x)
        return x_grad, weight_grad


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., in] times the transpose of `weight` [..., in] flattened to [out, in]: [..., out]."""
    return cast(Tensor, _Linear.apply(x, weight))


class ColumnParallelLinear(ShardedModule):
    """A linear layer whose outputs are cut over the tensor-parallel ranks.

    `shape` is the logical weight [..., in]; `boxes` say which part is here (default: dimension `dim` cut evenly), and
    `local_shape` its shape here. The bias has the same shape without the last dimension.
    """

    def __init__(
        self,
        build: Build,
        shape: tuple[int, ...],
        local_shape: tuple[int, ...],
        boxes: tuple[Box, ...],
        bias_boxes: tuple[Box, ...] | None,
        init: Init,
    ):
        super().__init__()
        self.group = build.mesh.tp
        self.weight = self.add_parameter("weight", ParamSpec(shape, local_shape, boxes, init), build)
        if bias_boxes is None:
            self.bias = None
        else:
            spec = ParamSpec(shape[:-1], local_shape[:-1], bias_boxes, ZEROS, weight_decay=False)
            self.bias = self.add_parameter("bias", spec, build)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in], equal on all ranks → [..., local outputs], flat."""
        y = linear(copy_to_group(x, self.group), self.weight)
        return y if self.bias is None else y + self.bias.view(-1)


class RowParallelLinear(ShardedModule):
    """A linear layer [out, in] whose inputs are cut over the tensor-parallel ranks; outputs are summed, then the bias
    is added once."""

    def __init__(self, build: Build, inputs: int, outputs: int, *, bias: bool, init: Init):
        super().__init__()
        self.group = build.mesh.tp
        place = build.place()
        local = (outputs, inputs // place.tp)
        self.weight = self.add_parameter(
            "weight", ParamSpec((outputs, inputs), local, cut((outputs, inputs), 1, place), init), build
        )
        if not bias:
            self.bias = None
        else:
            boxes = replicated((outputs,), place, partial=place.layout.sequence_parallel)
            spec = ParamSpec((outputs,), (outputs,), boxes, ZEROS, weight_decay=False)
            self.bias = self.add_parameter("bias", spec, build)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in / tp] → [..., out], equal on all ranks."""
        y = reduce_from_group(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
