"""Low-rank matrices beside linear layers (Hu et al. 2021; Kalajdzievski 2023 for the scale by the root of the rank).

Key idea: what is added, scale · B A x, is cut as the layer that it is added to. Beside a column-parallel layer A is
whole on every rank and B has the layer's rows; beside a row-parallel one A has the layer's columns and B is whole. So
only the narrow A x ever crosses ranks, and each B's boxes follow from those of the layer's weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed import random
from megalite.distributed.collectives import reduce_from_group
from megalite.distributed.layout import EXPERT
from megalite.distributed.param_spec import ZEROS, Init, ParamSpec, Shape, cut, cut_experts, replicated
from megalite.nn.dropout import dropout
from megalite.nn.gradients import sink_of
from megalite.nn.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, linear
from megalite.nn.module import Build, ShardedModule
from megalite.nn.moe.experts import ExpertLinear, grouped_linear
from megalite.nn.tokens import Tokens

Range = tuple[int, int]
Place = tuple[tuple[Any, ...], float]
"""Where a factor is in the matrix of several, as an index, and what it is multiplied by there."""


@dataclass(frozen=True)
class Slots:
    """Which part of a fused weight an adapter is beside: along dimension `dim`, in the logical weight and in this
    rank's."""

    dim: int
    logical: Range
    local: Range


@dataclass(frozen=True)
class LowRank:
    """`part`: what the adapter is beside, as a target's name. `drop`: dropout on its input."""

    part: str
    rank: int
    scale: float
    drop: float
    layer: int


def rows_spec(weight: ParamSpec, slots: Slots | None, rank: int) -> ParamSpec:
    """Of B [..., rank] for a weight [..., in], or for the `slots` of it."""
    slots = slots or Slots(0, (0, weight.shape[0]), (0, weight.local_shape[0]))
    dim, (low, high), (first, last) = slots.dim, slots.logical, slots.local
    boxes = []
    for box in weight.boxes:
        start = max(box.global_start[dim], low)
        count = min(box.global_start[dim] + box.shape[dim], high) - start
        if count > 0:
            here = box.local_start[dim] + start - box.global_start[dim]
            boxes.append(
                replace(
                    box,
                    global_start=_with(box.global_start, dim, start - low),
                    local_start=_with(box.local_start, dim, here - first),
                    shape=(*_with(box.shape, dim, count)[:-1], rank),
                )
            )
    shape, local = _with(weight.shape, dim, high - low), _with(weight.local_shape, dim, last - first)
    return ParamSpec((*shape[:-1], rank), (*local[:-1], rank), tuple(boxes), ZEROS)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def first_matrix(inputs: int) -> Init:
    """Uniform within 1 / sqrt(inputs): Kaiming's bound with a slope of sqrt(5), as PEFT has it."""
    return Init("uniform", value=1.0 / math.sqrt(inputs))


class _Assemble(torch.autograd.Function):
    """Factors side by side in one matrix, of zeros elsewhere, so that one product serves them all. Their gradients go
    to their sinks where they have such."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], places: Sequence[Place], *factors: Tensor) -> Tensor:
        ctx.places, ctx.sinks = places, [sink_of(factor) for factor in factors]
        matrix = factors[0].new_zeros(shape)
        for (index, scale), factor in zip(places, factors, strict=True):
            torch.mul(factor, scale, out=matrix[index])
        return matrix

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = []
        for (index, scale), sink in zip(ctx.places, ctx.sinks, strict=True):
            if sink is None:
                results.append(grads[0][index] * scale)
            else:
                sink.target().add_(grads[0][index], alpha=scale)
                results.append(None)
        return (None, None, *results)


def _assemble(shape: tuple[int, ...], places: Sequence[Place], factors: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, _Assemble.apply(shape, places, *factors))


class _Pair(ShardedModule):
    """A [rank, in] and B [..., rank]; of experts one of each for all of them."""

    def __init__(self, build: Build, settings: LowRank, a: ParamSpec, b: ParamSpec):
        super().__init__()
        self.settings, self.gradients = settings, build.weight_gradients
        self.a = self.add_parameter("a", a, build)
        self.b = self.add_parameter("b", b, build)

    def down(self, x: Tensor, keys: Tensor | None, index: Tensor | None, first: int, width: int) -> Tensor:
        """A dropout(`x`). `keys`: the dropout keys; None: it drops nothing. `index`: which tokens of the sequence `x`
        [s, b, columns] holds; its columns begin at `first` of `width`."""
        if keys is not None and index is not None and self.settings.drop:
            columns = first + torch.arange(x.shape[-1], device=x.device)
            index = (index[:, None] * width + columns)[:, None, :]
            key = random.fold(keys, self.settings.layer, f"lora {self.settings.part}")
            x = dropout(x, self.settings.drop, key[None, :, None], index)
        return linear(x, self.a, gradients=self.gradients)


class ColumnLora(ShardedModule):
    """Adapters beside a `ColumnParallelLinear`: one for the whole of it, or some for slots of its outputs; or beside a
    `ReplicatedLinear`, where no rank needs anything of another."""

    def __init__(
        self,
        build: Build,
        base: ColumnParallelLinear | ReplicatedLinear,
        adapters: Sequence[tuple[LowRank, Slots | None]],
    ):
        super().__init__()
        weight = base.param_specs["weight"]
        self.group = None if isinstance(base, ReplicatedLinear) else base.group
        self.gather, self.gradients = base.sequence_parallel and self.group is not None, build.weight_gradients
        self.inputs, self.rank = weight.shape[-1], sum(settings.rank for settings, _ in adapters)
        self.shape = (*weight.local_shape[:-1], self.rank)  # of all B together
        self.drops = any(settings.drop for settings, _ in adapters)
        self.rows: list[Place] = []  # where each A and each B is among them all
        self.columns: list[Place] = []
        place, end = build.place(), 0
        for settings, slots in adapters:
            shape = (settings.rank, self.inputs)
            boxes = replicated(shape, place, partial=base.sequence_parallel)
            a = ParamSpec(shape, shape, boxes, first_matrix(self.inputs))
            self.add_module(settings.part, _Pair(build, settings, a, rows_spec(weight, slots, settings.rank)))
            mine, end = slice(end, end + settings.rank), end + settings.rank
            outputs = () if slots is None else (*[slice(None)] * slots.dim, slice(*slots.local))
            self.rows.append(((mine,), 1.0))
            self.columns.append(((*outputs, ..., mine), settings.scale))

    def forward(self, y: Tensor, x: Tensor, tokens: Tokens | None) -> Tensor:
        """`y` [s, b, local outputs], to which is added in place; `x` as for the layer."""
        pairs = [pair for pair in self.children() if isinstance(pair, _Pair)]
        if self.drops and tokens is not None and tokens.dropout_keys is not None:  # each drops elements of its own
            at = tokens.dropout_keys, tokens.index_between_blocks
            narrow = torch.cat([pair.down(x, *at, 0, self.inputs) for pair in pairs], dim=-1)
        elif len(pairs) == 1:
            narrow = linear(x, pairs[0].a, gradients=self.gradients)
        else:
            narrow = linear(x, _assemble((self.rank, self.inputs), self.rows, [pair.a for pair in pairs]))
        b = _assemble(self.shape, self.columns, [pair.b for pair in pairs])
        return linear(narrow, b, self.group, gather=self.gather, onto=y)


class ExpertLora(ShardedModule):
    """The adapter beside the matrices of routed experts: to each its own, A [experts, rank, in] and B [experts, ...,
    rank]. What expert tensor parallelism leaves to be summed of a result it does too, so no rank needs anything of
    another."""

    def __init__(self, build: Build, base: ExpertLinear, settings: LowRank):
        super().__init__()
        self.settings, self.gradients, place = settings, build.weight_gradients, build.place(domain=EXPERT)
        experts, *outputs, inputs = base.param_specs["weight"].shape
        cuts_inputs = base.dim == len(outputs) + 1

        def spec(shape: Shape, dim: int | None, init: Init) -> ParamSpec:
            boxes = cut_experts(shape, dim, place)
            return ParamSpec(shape, boxes[0].shape, boxes, init, domain=EXPERT)

        a = spec((experts, settings.rank, inputs), 2 if cuts_inputs else None, first_matrix(inputs))
        b = spec((experts, *outputs, settings.rank), None if cuts_inputs else base.dim, ZEROS)
        self.add_module(settings.part, _Pair(build, settings, a, b))

    def forward(self, y: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
        """`y` [n, local outputs], `x` [n, local in], so many rows of each local expert after one another."""
        pair = self.get_submodule(self.settings.part)
        assert isinstance(pair, _Pair)
        narrow = grouped_linear(x, pair.a, counts, self.gradients) * self.settings.scale
        return y + grouped_linear(narrow, pair.b, counts, self.gradients)


class RowLora(ShardedModule):
    """The adapter beside a `RowParallelLinear`."""

    def __init__(self, build: Build, base: RowParallelLinear, settings: LowRank):
        super().__init__()
        outputs, self.inputs = base.param_specs["weight"].shape
        self.group, self.scatter, self.settings = base.group, base.sequence_parallel, settings
        place = build.place()
        shape = (settings.rank, self.inputs)
        a = ParamSpec(shape, (settings.rank, self.inputs // place.tp), cut(shape, 1, place), first_matrix(self.inputs))
        whole = (outputs, settings.rank)
        b = ParamSpec(whole, whole, replicated(whole, place, partial=base.sequence_parallel), ZEROS)
        self.add_module(settings.part, _Pair(build, settings, a, b))

    def forward(self, y: Tensor, x: Tensor, tokens: Tokens | None) -> Tensor:
        """`y` [s, b, out], to which is added in place, with sequence parallelism this rank's part of s; `x` [s, b,
        in / tp]."""
        pair = self.get_submodule(self.settings.part)
        assert isinstance(pair, _Pair)
        keys, index = (None, None) if tokens is None else (tokens.dropout_keys, tokens.queries.index)
        narrow = pair.down(x, keys, index, self.group.rank * x.shape[-1], self.inputs)
        narrow = reduce_from_group(narrow, self.group, sequence_parallel=self.scatter)
        b = _assemble(tuple(pair.b.shape), [((...,), self.settings.scale)], [pair.b])
        return linear(narrow, b, onto=y)
