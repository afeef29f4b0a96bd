"""Column- and row-parallel linear layers (Shoeybi et al. 2019).

Key idea: the weight's gradient is accumulated straight into the wide main gradient (see `nn.gradient_sink`), by the
GEMM that computes it where torch has such a one. Without a sink the layer is an ordinary one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.distributed.collectives import (
    Pending,
    reduce_from_group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megalite.distributed.mesh import Group
from megalite.distributed.param_spec import ZEROS, Box, Init, ParamSpec, cut, replicated
from megalite.nn.gradient_sink import GradientSink, sink_of
from megalite.nn.module import Build, SequenceInfo, ShardedModule
from megalite.nn.weight_gradients import WeightGradients


@torch.no_grad()
def accumulate_weight_gradient(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """main_grad += grad^T x: grad [tokens, out] and x [tokens, in] in the compute dtype, main_grad [out, in] wide."""
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), x)
    elif grad.is_cuda:
        torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:  # a CPU has no GEMM of mixed dtypes: the product of one microbatch is rounded before it is added
        main_grad.add_(grad.t() @ x)


def _product(x: Tensor, weight: Tensor, onto: Tensor | None, rows: int | None, gathered: Group | None) -> Tensor:
    """x W^T, or `onto` with that added. `gathered`: ranks whose `x` are put together first."""
    if gathered is not None:
        x = start_all_gather(x, gathered).wait()
    matrix = weight.view(-1, x.shape[-1])[:rows]
    if onto is None:
        return F.linear(x, matrix)
    onto.flatten(0, -2).addmm_(x.flatten(0, -2), matrix.t())
    return onto


class _Linear(torch.autograd.Function):
    """x W^T for an input that is equal on the group's ranks, or with `gather` cut along the sequence over them.

    In the backward the input's gradient is summed over the ranks while the weight's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        onto: Tensor | None,
        rows: int | None,
        group: Group | None,
        gather: bool,
        gradients: WeightGradients | None,
    ) -> Tensor:
        # A frozen weight needs no input kept for its gradient.
        ctx.save_for_backward(weight, *([x] if ctx.needs_input_grad[1] else []))
        ctx.rows, ctx.group, ctx.gather, ctx.gradients = rows, group, gather, gradients
        ctx.inputs = x.shape[-1]
        ctx.sink = sink_of(weight)  # recomputation hands the backward another tensor, without it
        if onto is not None:
            ctx.mark_dirty(onto)
        return _product(x, weight, onto, rows, group if gather else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        grad, group = grads[0], ctx.group
        matrix = weight.view(-1, ctx.inputs)[: ctx.rows]
        gathered = [start_all_gather(x, group) if group is not None and ctx.gather else Pending(x) for x in kept]
        x_grad = Pending(grad @ matrix) if ctx.needs_input_grad[0] else None
        x_full = [pending.wait() for pending in gathered]
        if x_grad is not None and group is not None:
            start = start_reduce_scatter if ctx.gather else start_all_reduce
            x_grad = start(x_grad.result, group)
        weight_grad = _weight_gradient(weight, grad, x_full[0], ctx) if x_full else None
        onto_grad = grad if ctx.needs_input_grad[2] else None
        return None if x_grad is None else x_grad.wait(), weight_grad, onto_grad, None, None, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, ctx: Any) -> Tensor | None:
    """Put the weight's gradient into its sink, now or later; or return it where there is none."""
    flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
    if ctx.sink is None:
        result = torch.zeros_like(weight)
        result.view(-1, flat_x.shape[1])[: flat_grad.shape[1]] = flat_grad.t() @ flat_x
        return result
    job = partial(_fill_sink, ctx.sink, flat_grad, flat_x)
    if ctx.gradients is None:
        job()
    else:
        ctx.gradients.add(job)
    return None


def _fill_sink(sink: GradientSink, grad: Tensor, x: Tensor) -> None:
    accumulate_weight_gradient(sink.target().view(-1, x.shape[1])[: grad.shape[1]], grad, x)
    sink.arrived()


def linear(
    x: Tensor,
    weight: Tensor,
    group: Group | None = None,
    *,
    gather: bool = False,
    rows: int | None = None,
    onto: Tensor | None = None,
    gradients: WeightGradients | None = None,
) -> Tensor:
    """`x` [s, ..., in] times the transpose of `weight` [..., in] flattened to [out, in]: [s, ..., out].

    `group`: ranks that hold different rows of the weight; the input's gradient is summed over them. `gather`: each of
    them holds only its part of the input's first dimension. `rows`: only the first so many outputs. `onto`: a tensor
    that the result is added to in place, which nothing else may need the old values of.
    """
    if group is not None and group.size == 1:
        group = None
    if not torch.is_grad_enabled():
        return _product(x, weight, onto, rows, group if gather else None)
    return cast(Tensor, _Linear.apply(x, weight, onto, rows, group, gather, gradients))


class ColumnParallelLinear(ShardedModule):
    """A linear layer whose outputs are cut over the tensor-parallel ranks.

    `shape` is the logical weight [..., in]; `boxes` say which part is here (default: dimension `dim` cut evenly), and
    `local_shape` its shape here. The bias has the same shape without the last dimension. `lora`: adds what low-rank
    matrices do to the output, in place, called with it and the same arguments.
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
        self.group, self.gather = build.mesh.tp, build.mesh.layout.sequence_parallel
        self.gradients = build.weight_gradients
        self.weight = self.add_parameter("weight", ParamSpec(shape, local_shape, boxes, init), build)
        if bias_boxes is None:
            self.bias = None
        else:
            spec = ParamSpec(shape[:-1], local_shape[:-1], bias_boxes, ZEROS, weight_decay=False)
            self.bias = self.add_parameter("bias", spec, build)
        self.lora: nn.Module | None = None

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """`x` [s, b, in], equal on all ranks (or this rank's part of s) → [s, b, local outputs], flat."""
        y = linear(x, self.weight, self.group, gather=self.gather, gradients=self.gradients)
        if self.bias is not None:
            y = y + self.bias.view(-1)
        return y if self.lora is None else cast(Tensor, self.lora(y, x, info))


class RowParallelLinear(ShardedModule):
    """A linear layer [out, in] whose inputs are cut over the tensor-parallel ranks; outputs are summed, then the bias
    is added once. `lora`: as in `ColumnParallelLinear`."""

    def __init__(self, build: Build, inputs: int, outputs: int, *, bias: bool, init: Init):
        super().__init__()
        self.group, self.scatter = build.mesh.tp, build.mesh.layout.sequence_parallel
        self.gradients = build.weight_gradients
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
        self.lora: nn.Module | None = None

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """`x` [s, b, in / tp] → [s, b, out], equal on all ranks (or this rank's part of s)."""
        y = linear(x, self.weight, gradients=self.gradients)
        y = reduce_from_group(y, self.group, sequence_parallel=self.scatter)
        if self.bias is not None:
            y = y + self.bias
        return y if self.lora is None else cast(Tensor, self.lora(y, x, info))
