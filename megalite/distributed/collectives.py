"""Every collective of megalite, in one place.

Key idea: a group of one makes each of these the identity, and where a collective is differentiated it comes as a pair
of autograd functions that are each other's transpose (Shoeybi et al. 2019, section 3: f and g).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over the group; `op` is sum, max or min. Returns `tensor`, which must be contiguous."""
    if group.size > 1:
        dist.all_reduce(tensor, op=_OPS[op], group=group.process_group)
    return tensor


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy the tensor of the group's member `source` to all, in place."""
    if group.size > 1:
        dist.broadcast(tensor, src=group.ranks[source], group=group.process_group)
    return tensor


def all_gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's picklable `value`, in group order."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """The picklable value of the group's member `source`."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.process_group)
    return box[0]


def barrier(group: Group) -> None:
    """Return once every member is here."""
    if group.size > 1:
        dist.barrier(group=group.process_group)


class _CopyToGroup(torch.autograd.Function):
    """Identity forward, all-reduce backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous().clone(), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    """All-reduce forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """`x`, equal on all members; its gradient is summed over them."""
    return x if group.size == 1 else cast(Tensor, _CopyToGroup.apply(x, group))


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """The sum of the members' `x`; each gets the gradient unchanged."""
    return x if group.size == 1 else cast(Tensor, _ReduceFromGroup.apply(x, group))
