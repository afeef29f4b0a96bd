"""Column- and row-parallel linear layers (Shoeybi et al. 2019).

Key idea: the weight's gradient is accumulated straight into the wide main gradient (see `nn.gradient_sink`), by the
GEMM that computes it if torch has such a GEMM. Without a sink it is an ordinary layer.
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


def _whole(part: Tensor, group: Group | None) -> Tensor:
    """The whole sequence of which the ranks of `group` hold parts; None: `part` is it."""
    return part if group is None else start_all_gather(part, group).wait()


def _product(
    x: Tensor, weight: Tensor, onto: Tensor | None, rows: int | None, gather: Group | None, scatter: Group | None
) -> Tensor:
    """x W^T, or `onto` with that added. `gather`: ranks whose `x` are put together first. `scatter`: ranks whose
    results are summed, of which each keeps its part of the sequence."""
    x = _whole(x, gather)
    matrix = weight.view(-1, x.shape[-1])[:rows]
    if onto is None:
        y = F.linear(x, matrix)
        return y if scatter is None else start_reduce_scatter(y, scatter).wait()
    onto.flatten(0, -2).addmm_(x.flatten(0, -2), matrix.t())
    return onto


class _Linear(torch.autograd.Function):
    """x W^T for an input that is equal on the ranks of `group`, or cut along the sequence over those of `gather`; or
    for one whose columns are cut over the ranks of `scatter`.

    In the backward the input's gradient is summed over the ranks while the weight's gradient is computed. Where that
    waits, it waits with this rank's parts of the sequence alone, and gathers them again when its turn comes: all ranks
    take such turns in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        onto: Tensor | None,
        rows: int | None,
        group: Group | None,
        gather: Group | None,
        scatter: Group | None,
        gradients: WeightGradients | None,
    ) -> Tensor:
        # A frozen weight needs no input kept for its gradient.
        ctx.save_for_backward(weight, *([x] if ctx.needs_input_grad[1] else []))
        ctx.rows, ctx.group, ctx.gather, ctx.scatter, ctx.gradients = rows, group, gather, scatter, gradients
        ctx.inputs = x.shape[-1]
        ctx.sink = sink_of(weight)  # recomputation hands the backward another tensor, without it
        if onto is not None:
            ctx.mark_dirty(onto)
        return _product(x, weight, onto, rows, gather, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        matrix = weight.view(-1, ctx.inputs)[: ctx.rows]
        waits = ctx.sink is not None and ctx.gradients is not None and ctx.gradients.deferred
        if waits and kept:
            ctx.gradients.jobs.append(partial(_fill_sink, ctx.sink, grads[0], kept.pop(), ctx.scatter, ctx.gather))
        grad = _whole(grads[0], ctx.scatter)
        gathered = [Pending(x) if ctx.gather is None else start_all_gather(x, ctx.gather) for x in kept]
        x_grad = Pending(grad @ matrix) if ctx.needs_input_grad[0] else None
        x_full = [pending.wait() for pending in gathered]
        if x_grad is not None and ctx.gather is not None:
            x_grad = start_reduce_scatter(x_grad.result, ctx.gather)
        elif x_grad is not None and ctx.group is not None:
            x_grad = start_all_reduce(x_grad.result, ctx.group)
        weight_grad = _weight_gradient(weight, grad, x_full[0], ctx.sink) if x_full else None
        onto_grad = grad if ctx.needs_input_grad[2] else None
        return None if x_grad is None else x_grad.wait(), weight_grad, onto_grad, None, None, None, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, sink: GradientSink | None) -> Tensor | None:
    """Put the weight's gradient into its sink, or return it where there is none."""
    if sink is not None:
        _fill_sink(sink, grad, x)
        return None
    flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
    result = torch.zeros_like(weight)
    result.view(-1, flat_x.shape[1])[: flat_grad.shape[1]] = flat_grad.t() @ flat_x
    return result


@torch.no_grad()
def _fill_sink(
    sink: GradientSink, grad: Tensor, x: Tensor, scattered: Group | None = None, gathered: Group | None = None
) -> None:
    """Add grad^T x. `scattered`, `gathered`: ranks that hold the other parts of the sequence of `grad`, of `x`."""
    flat_grad, flat_x = _whole(grad, scattered).flatten(0, -2), _whole(x, gathered).flatten(0, -2)
    accumulate_weight_gradient(sink.target().view(-1, flat_x.shape[1])[: flat_grad.shape[1]], flat_grad, flat_x)
    sink.arrived()


def linear(
    x: Tensor,
    weight: Tensor,
    group: Group | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
    rows: int | None = None,
    onto: Tensor | None = None,
    gradients: WeightGradients | None = None,
) -> Tensor:
    """`x` [s, ..., in] times the transpose of `weight` [..., in] flattened to [out, in]: [s, ..., out].

    `group`: ranks that hold different rows of the weight; the input's gradient is summed over them. `gather`: each of
    them holds only its part of the input's first dimension. `scatter`: `group` holds different columns of input and
    weight instead; the output is summed over it, and each rank keeps its part of the first dimension. `rows`: only the
    first so many outputs. `onto`: a tensor that the result is added to in place, which nothing else may need the old
    values of.
    """
    assert not (scatter and (gather or onto is not None))
    if group is not None and group.size == 1:
        group = None
    gathered, scattered = group if gather else None, group if scatter else None
    if not torch.is_grad_enabled():
        return _product(x, weight, onto, rows, gathered, scattered)
    same = None if gather or scatter else group
    return cast(Tensor, _Linear.apply(x, weight, onto, rows, same, gathered, scattered, gradients))


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
        if self.scatter:
            y = linear(x, self.weight, self.group, scatter=True, gradients=self.gradients)
        else:
            y = reduce_from_group(linear(x, self.weight, gradients=self.gradients), self.group)
        if self.bias is not None:
            y = y + self.bias
        return y if self.lora is None else cast(Tensor, self.lora(y, x, info))
