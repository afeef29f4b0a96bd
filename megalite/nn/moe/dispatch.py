"""Brings tokens to the ranks of their experts, and the results back.

Key idea: every rank of `mesh.experts` has tokens of its own. With `alltoall` a row goes to each of the ranks that share
its expert's matrices (one, without expert tensor parallelism), sorted by expert, so that what arrives needs one more
sort; the parts of a result are summed where the token is. With `allgather` every rank gets all tokens and their routing
and picks what is for its experts. Either way all ranks take part in the same collectives, whatever tokens there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_counts, exchange_rows, transpose_over_ranks
from megalite.distributed.mesh import Mesh
from megalite.nn.moe.routing import Routing

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""Of rows [n, h], so many of each local expert after one another: [n, h]."""


class _Pick(torch.autograd.Function):
    """Copies of rows: row i of [n, h] is copy i · k to i · k + k - 1 of n · k. `order` int64 [m]: which copies, each at
    most once. The gradient of a row is the sum of those of its copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = x.shape[0], copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,), (rows, copies) = ctx.saved_tensors, ctx.shape
        return _put(grads[0], order, rows * copies).view(rows, copies, grads[0].shape[1]).sum(dim=1), None, None


class _Place(torch.autograd.Function):
    """Rows [m, h] at `order` int64 [m] of [n, h], zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order)
        return _put(x, order, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _put(x: Tensor, order: Tensor, rows: int) -> Tensor:
    """All of `order` differ, so nothing is summed, and in no varying order."""
    result = x.new_empty(rows, x.shape[1]) if len(order) == rows else x.new_zeros(rows, x.shape[1])
    return result.index_copy_(0, order, x)


def pick(x: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    return cast(Tensor, _Pick.apply(x, order, copies))


def place(x: Tensor, order: Tensor, rows: int) -> Tensor:
    return cast(Tensor, _Place.apply(x, order, rows))


def _weighted_sum(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum of results times weights: `rows` [m, h] are of the copies `order` of tokens with `weights` wide [n, k]."""
    copies = place(rows, order, weights.numel()).view(*weights.shape, rows.shape[1])
    return (copies * weights[..., None]).sum(dim=1)


class Dispatcher(ABC):
    """Of a layer with `experts` experts."""

    def __init__(self, mesh: Mesh, experts: int):
        self.group, self.layout, self.experts = mesh.experts, mesh.layout, experts
        self.local = experts // mesh.layout.ep
        self.first = mesh.coordinates["ep"] * self.local

    @abstractmethod
    def __call__(self, x: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """`x` [n, h] of this rank → wide [n, h]."""

    def _sorted(self, experts: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which copies of tokens, by expert, int64 [m]: those that are `chosen`, bool as `experts` [n, k]; and how many
        each of all experts has, int64 [experts]."""
        flat = experts.flatten()
        if chosen is not None:
            flat = flat.where(chosen.flatten(), self.experts)  # sorts last
        counts = torch.bincount(flat, minlength=self.experts + 1)
        order = flat.argsort(stable=True)
        return (order if chosen is None else order[: int(counts[: self.experts].sum())]), counts[: self.experts]


class AllToAll(Dispatcher):
    """Rows to the ranks of their experts."""

    def __call__(self, x: Tensor, routing: Routing, compute: Compute) -> Tensor:
        order, counts = self._sorted(routing.experts, routing.kept)
        rows = pick(x, order, routing.experts.shape[1])
        if self.group.size == 1:
            return _weighted_sum(compute(rows, counts.tolist()), order, routing.weights)
        copies = self.layout.etp
        by_rank = counts.view(-1, self.local).repeat_interleave(copies, dim=0)  # [members, local experts]
        arriving = transpose_over_ranks(by_rank, self.group)
        sent, received = torch.stack((by_rank.sum(1), arriving.sum(1))).tolist()
        leaving = torch.cat([each for part in rows.split(sent[::copies]) for each in [part] * copies])
        there = exchange_rows(leaving, sent, received, self.group)
        results = self._by_expert(there, arriving, compute)
        back = exchange_rows(results, received, sent, self.group).split(sent)
        sums = [sum(back[at + 1 : at + copies], back[at]) for at in range(0, len(back), copies)]
        return _weighted_sum(torch.cat(sums), order, routing.weights)

    def _by_expert(self, rows: Tensor, arriving: Tensor, compute: Compute) -> Tensor:
        """`rows` of each member by expert, so many (`arriving`) of each → by expert, computed, and as they were."""
        experts = torch.arange(self.local, device=rows.device).repeat(len(arriving))
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        return place(compute(pick(rows, order), arriving.sum(0).tolist()), order, len(rows))


class AllGather(Dispatcher):
    """All rows to all ranks."""

    def __call__(self, x: Tensor, routing: Routing, compute: Compute) -> Tensor:
        size, counts = self.group.size, all_gather_counts(len(x), self.group, x.device)
        mine = [len(x)] * size

        def from_all(each: Tensor) -> Tensor:
            return exchange_rows(each.repeat(size, 1), mine, counts, self.group)

        experts, weights, everyone = (from_all(each) for each in (routing.experts, routing.weights, x))
        chosen = (experts >= self.first) & (experts < self.first + self.local)
        if routing.kept is not None:
            chosen &= from_all(routing.kept.to(torch.uint8)).bool()
        order, by_expert = self._sorted(experts, chosen)
        here = by_expert[self.first : self.first + self.local].tolist()
        results = compute(pick(everyone, order, experts.shape[1]), here)
        parts = exchange_rows(_weighted_sum(results, order, weights), counts, mine, self.group)
        return parts.view(size, *x.shape).sum(dim=0)


DISPATCHERS: dict[str, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}
