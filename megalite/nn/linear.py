"""Column- and row-parallel linear layers (Shoeybi et al. 2019).

Key idea: the weight's gradient is accumulated straight into the wide main gradient (see `nn.gradients`), by the GEMM
that computes it where torch has such a one. Without a sink the layer is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import (
    Pending,
    reduce_from_group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megalite.distributed.mesh import Group
from megalite.distributed.param_spec import NO_DECAY, ZEROS, Box, Init, ParamSpec, cut, replicated
from megalite.nn.gradients import GradientSink, WeightGradients, sink_of
from megalite.nn.module import Build, ShardedModule
from megalite.nn.tokens import Tokens
from megalite.precision.products import Factor, Products, Role


def _whole(part: Tensor, group: Group | None) -> Tensor:
    """The whole sequence of which the ranks of `group` hold parts; None: `part` is it."""
    return part if group is None else start_all_gather(part, group).wait()


@dataclass(frozen=True)
class _LinearOptions:
    """How a layer computes its output. `rows`: only the first so many outputs. `group`: ranks over which the input's
    gradient is summed. `gather`: ranks whose inputs are put together first. `scatter`: ranks whose outputs are summed,
    of which each keeps its part of the sequence."""

    products: Products
    rows: int | None
    group: Group | None
    gather: Group | None
    scatter: Group | None
    gradients: WeightGradients | None

    def input(self, x: Tensor) -> Factor:
        """The whole input."""
        return self.products.factor("input", _whole(x, self.gather))

    def output(self, x: Factor, weight: Tensor, onto: Tensor | None) -> Tensor:
        """x W^T, or `onto` with that added."""
        matrix = weight.view(-1, x.tensor.shape[-1])[: self.rows]
        if onto is not None:
            self.products.add_output(onto, x, matrix)
            return onto
        y = self.products.output(x, matrix)
        return y if self.scatter is None else start_reduce_scatter(y, self.scatter).wait()

    @torch.no_grad()
    def fill_later(self, sink: GradientSink, grad: Sequence[Tensor], x: Sequence[Tensor]) -> None:
        """Add a weight's gradient of what was kept of this rank's parts of the sequence."""
        whole_grad = self.products.restore("gradient", _whole(grad[0], self.scatter), *grad[1:])
        whole_x = self.products.restore("input", _whole(x[0], self.gather), *x[1:])
        self.fill(sink, whole_grad, whole_x)

    @torch.no_grad()
    def fill(self, sink: GradientSink, grad: Factor, x: Factor) -> None:
        """Add a weight's gradient, of whole sequences."""
        rows = sink.target().view(-1, x.tensor.shape[-1])[: grad.tensor.shape[-1]]
        self.products.add_weight_gradient(rows, grad, x)


class _Linear(torch.autograd.Function):
    """x W^T for an input that is equal on the ranks of a group, or cut along the sequence over those to gather; or for
    one whose columns are cut over the ranks to scatter to.

    In the backward the input's gradient is summed over the ranks while the weight's gradient is computed. Where that
    waits, it waits with this rank's parts of the sequence alone, and gathers them again when its turn comes: all ranks
    take such turns in the same order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, onto: Tensor | None, how: _LinearOptions) -> Tensor:
        factor = how.input(x)
        # A frozen weight needs no input kept for its gradient.
        ctx.save_for_backward(weight, *(how.products.keep(factor, x) if ctx.needs_input_grad[1] else ()))
        ctx.how, ctx.inputs = how, x.shape[-1]
        ctx.sink = sink_of(weight)  # recomputation hands the backward another tensor, without it
        if onto is not None:
            ctx.mark_dirty(onto)
        return how.output(factor, weight, onto)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how, (weight, *kept) = ctx.how, ctx.saved_tensors
        grad = how.products.factor("gradient", _whole(grads[0], how.scatter))
        if kept and ctx.sink is not None and how.gradients is not None and how.gradients.deferred:
            how.gradients.jobs.append(partial(how.fill_later, ctx.sink, how.products.keep(grad, grads[0]), kept))
            kept = []
        gathered = [Pending(x) if how.gather is None else start_all_gather(x, how.gather) for x in kept[:1]]
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = Pending(how.products.input_gradient(grad, weight.view(-1, ctx.inputs)[: how.rows]))
        x_full = [how.products.restore("input", pending.wait(), *kept[1:]) for pending in gathered]
        if x_grad is not None and how.gather is not None:
            x_grad = start_reduce_scatter(x_grad.result, how.gather)
        elif x_grad is not None and how.group is not None:
            x_grad = start_all_reduce(x_grad.result, how.group)
        weight_grad = None
        if x_full and ctx.sink is not None:
            how.fill(ctx.sink, grad, x_full[0])
        elif x_full:
            assert weight.element_size() > 1, "a weight that is stored in eight bits needs a sink"
            weight_grad = torch.zeros_like(weight)
            rows = weight_grad.view(-1, ctx.inputs)[: grad.tensor.shape[-1]]
            rows.copy_(how.products.weight_gradient(grad, x_full[0]))
        onto_grad = grad.tensor if ctx.needs_input_grad[2] else None
        return None if x_grad is None else x_grad.wait(), weight_grad, onto_grad, None


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
    products: Products | None = None,
) -> Tensor:
    """`x` [s, ..., in] times the transpose of `weight` [..., in] flattened to [out, in]: [s, ..., out].

    `group`: ranks that hold different rows of the weight; the input's gradient is summed over them. `gather`: each of
    them holds only its part of the input's first dimension. `scatter`: `group` holds different columns of input and
    weight instead; the output is summed over it, and each rank keeps its part of the first dimension. `rows`: only the
    first so many outputs. `onto`: a tensor that the result is added to in place, which nothing else may need the old
    values of. `products`: None: in the dtype of `x`.
    """
    assert not (scatter and (gather or onto is not None))
    if group is not None and group.size == 1:
        group = None
    how = _LinearOptions(
        products or Products(),
        rows,
        group=None if gather or scatter else group,
        gather=group if gather else None,
        scatter=group if scatter else None,
        gradients=gradients,
    )
    if not torch.is_grad_enabled():
        return how.output(how.input(x), weight, onto)
    return cast(Tensor, _Linear.apply(x, weight, onto, how))


class ParallelLinear(ShardedModule):
    """A weight that is cut over the tensor-parallel ranks or whole on each, and perhaps a bias. `lora`: adds what
    low-rank matrices do to the output, in place, called with it and the same arguments.

    `cut`: the factors of its products of which ranks hold different parts. `inputs`: of the whole layer.
    """

    def __init__(self, build: Build, weight: ParamSpec, bias: ParamSpec | None, cut: tuple[Role, ...]):
        super().__init__()
        self.group, self.sequence_parallel = build.mesh.tp, build.mesh.layout.sequence_parallel
        self.gradients, self.products = build.weight_gradients, build.products(cut)
        self.weight = self.add_parameter("weight", weight, build, build.precision.weight)
        self.bias = None if bias is None else self.add_parameter("bias", bias, build)
        self.inputs = weight.shape[-1]
        self.lora: nn.Module | None = None

    def _finished(self, y: Tensor, x: Tensor, tokens: Tokens | None) -> Tensor:
        if self.bias is not None:
            y = y + self.bias.view(-1)
        return y if self.lora is None else cast(Tensor, self.lora(y, x, tokens))


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose outputs are cut over the tensor-parallel ranks.

    `shape` is the logical weight [..., in]; `boxes` say which part is here, and `local_shape` its shape here. The bias
    has the same shape without the last dimension, and is there where it has boxes.
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
        bias = None
        if bias_boxes is not None:
            bias = ParamSpec(shape[:-1], local_shape[:-1], bias_boxes, ZEROS, NO_DECAY)
        super().__init__(build, ParamSpec(shape, local_shape, boxes, init), bias, ("weight", "gradient"))

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """`x` [s, b, in], equal on all ranks (or this rank's part of s) → [s, b, local outputs], flat."""
        gather, gradients = self.sequence_parallel, self.gradients
        y = linear(x, self.weight, self.group, gather=gather, gradients=gradients, products=self.products)
        return self._finished(y, x, tokens)


class ReplicatedLinear(ParallelLinear):
    """A linear layer [out, in] that is whole on every tensor-parallel rank, without a bias. With sequence parallelism
    each computes its part of the sequence."""

    def __init__(self, build: Build, inputs: int, outputs: int, init: Init):
        shape, partial = (outputs, inputs), build.mesh.layout.sequence_parallel
        weight = ParamSpec(shape, shape, replicated(shape, build.place(), partial=partial), init)
        super().__init__(build, weight, None, ("input", "gradient") if partial else ())

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """`x` [s, b, in] → [s, b, out]."""
        return self._finished(linear(x, self.weight, gradients=self.gradients, products=self.products), x, tokens)


class RowParallelLinear(ParallelLinear):
    """A linear layer [out, in] whose inputs are cut over the tensor-parallel ranks; outputs are summed, then the bias
    is added once."""

    def __init__(self, build: Build, inputs: int, outputs: int, *, bias: bool, init: Init):
        place, shape = build.place(), (outputs, inputs)
        boxes = replicated((outputs,), place, partial=place.layout.sequence_parallel)
        super().__init__(
            build,
            ParamSpec(shape, (outputs, inputs // place.tp), cut(shape, 1, place), init),
            ParamSpec((outputs,), (outputs,), boxes, ZEROS, treatment=NO_DECAY) if bias else None,
            ("input", "weight"),
        )

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """`x` [s, b, in / tp] → [s, b, out], equal on all ranks (or this rank's part of s)."""
        scatter = self.sequence_parallel
        group = self.group if scatter else None
        y = linear(x, self.weight, group, scatter=scatter, gradients=self.gradients, products=self.products)
        return self._finished(y if scatter else reduce_from_group(y, self.group), x, tokens)
