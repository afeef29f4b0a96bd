"""Every collective of megalite, in one place.

Key idea: a group of one makes each of these the identity, and where a collective is differentiated its backward is its
transpose (Shoeybi et al. 2019, section 3: f and g). The input side of a layer (Megatron's f) lies in `nn.linear`, where
its backward overlaps with the weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Group, Mesh

Label = TypeVar("Label")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over the group; `op` is sum, max or min. Returns `tensor`, which must be contiguous."""
    if group.size > 1:
        dist.all_reduce(tensor, op=_OPS[op], group=group.process_group)
    return tensor


def all_gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's picklable `value`, in group order."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def all_gather_counts(count: int, group: Group, device: torch.device) -> list[int]:
    """Every member's number, in group order."""
    if group.size == 1:
        return [count]
    counts = torch.empty(group.size, dtype=torch.int64, device=device)
    dist.all_gather_single(counts, torch.tensor([count], device=device), group=group.process_group)
    return cast(list[int], counts.tolist())


def gather_tensors(
    mine: Sequence[tuple[Label, Tensor]], group: Group, device: torch.device
) -> Iterator[tuple[Label, Tensor]]:
    """Every member's labelled tensors, in group order, one at a time on the first member, on `device`; none
    on the others. Labels are picklable and small. Collective: every member must exhaust it."""
    told = [(label, tuple(tensor.shape), tensor.dtype) for label, tensor in mine]
    everyone = all_gather_objects(told, group)
    if group.rank > 0:
        for _, tensor in mine:
            dist.send(tensor.to(device).contiguous(), dst=group.ranks[0], group=group.process_group)
        return
    yield from mine
    for member, theirs in zip(group.ranks[1:], everyone[1:], strict=True):
        for label, shape, dtype in theirs:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, src=member, group=group.process_group)
            yield label, tensor


def exchange(parcels: Mapping[int, Tensor], sizes: Mapping[int, int], mesh: Mesh) -> dict[int, Tensor]:
    """Bytes between any ranks of the world: `parcels` [n] (uint8, on the host) go to the ranks that they are for, and
    of each rank in `sizes` come so many. Collective; nothing is sent where nothing is to come."""
    group, device = mesh.world.process_group, mesh.device
    received = {rank: torch.empty(size, dtype=torch.uint8, device=device) for rank, size in sizes.items()}
    works = [dist.P2POp(dist.isend, data.to(device), rank, group) for rank, data in parcels.items() if len(data)]
    works += [dist.P2POp(dist.irecv, data, rank, group) for rank, data in received.items() if len(data)]
    for work in dist.batch_isend_irecv(works) if works else ():
        work.wait()
    return {rank: data.cpu() for rank, data in received.items()}


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


@dataclass(frozen=True)
class Pending:
    """A collective under way: `wait()` returns its result. Until then neither input nor result may be touched."""

    result: Tensor
    works: Sequence[dist.Work] = ()
    input: Tensor | None = None  # kept alive

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """The sum of the members' `x`, in place where it is contiguous."""
    if group.size == 1:
        return Pending(x)
    x = x.contiguous()
    return Pending(x, [dist.all_reduce(x, group=group.process_group, async_op=True)])


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """The members' `x` [n, ...] one after another: [n · size, ...]."""
    if group.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    return Pending(result, [dist.all_gather_single(result, x, group=group.process_group, async_op=True)], x)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """This member's part [n / size, ...] of the sum of the members' `x` [n, ...]."""
    if group.size == 1:
        return Pending(x)
    assert x.shape[0] % group.size == 0, f"{group.size} ranks do not divide the first dimension of {tuple(x.shape)}"
    x = x.contiguous()
    result = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    return Pending(result, [dist.reduce_scatter_single(result, x, group=group.process_group, async_op=True)], x)


def start_shift(x: Tensor, group: Group) -> Pending:
    """The `x` of the member before this one, the last being before the first; this one's goes to the next. All have the
    same shape."""
    x, size = x.contiguous(), group.size
    result = torch.empty_like(x)
    after, before = (group.ranks[(group.rank + step) % size] for step in (1, -1))
    sent = dist.P2POp(dist.isend, x, after, group.process_group)
    received = dist.P2POp(dist.irecv, result, before, group.process_group)
    return Pending(result, dist.batch_isend_irecv([sent, received]), x)


def sum_over_ranks(tensor: Tensor, ranks: tuple[int, ...], mesh: Mesh, replica: Group) -> Tensor:
    """Sum a contiguous `tensor` in place over any `ranks` of a replica, equal bit for bit on all of them.

    An all-reduce where they are one of the mesh's groups; else each sends its tensor to the others, which add in rank
    order: for copies that few ranks share, such as a key/value head or a tied embedding in a deep pipeline.
    """
    group = mesh.group_of_ranks(ranks)
    if group is not None:
        return all_reduce(tensor, group)
    received = {rank: torch.empty_like(tensor) for rank in ranks if rank != mesh.rank}
    operations = []
    for rank, buffer in received.items():
        operations.append(dist.P2POp(dist.isend, tensor, rank, replica.process_group))
        operations.append(dist.P2POp(dist.irecv, buffer, rank, replica.process_group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    received[mesh.rank] = tensor.clone()
    tensor.zero_()
    for rank in ranks:
        tensor += received[rank]
    return tensor


class _ReduceFromGroup(torch.autograd.Function):
    """All-reduce forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the first dimension forward, all-gather backward (Korthikanti et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_reduce_scatter(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(grads[0], ctx.group).wait(), None


class _GatherSequence(torch.autograd.Function):
    """All-gather along the first dimension forward, reduce-scatter backward (Korthikanti et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_all_gather(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return start_reduce_scatter(grads[0], ctx.group).wait(), None


class _Transpose(torch.autograd.Function):
    """Part i of the first dimension to member i, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, x = group, x.contiguous()
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=group.process_group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Transpose.apply(grads[0], ctx.group)), None


def transpose_over_ranks(x: Tensor, group: Group) -> Tensor:
    """`x` [size, ...], whose i-th part is for member i → [size, ...], whose i-th part is from member i."""
    return x if group.size == 1 else cast(Tensor, _Transpose.apply(x, group))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.how, x = (received, sent, group), x.contiguous()
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x, list(received), list(sent), group=group.process_group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return cast(Tensor, _ExchangeRows.apply(grads[0], *ctx.how)), None, None, None


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """The first `sent[0]` rows of `x` [n, ...] to the first member, and so on; what came from each, in member order:
    [sum of `received`, ...]."""
    return x if group.size == 1 else cast(Tensor, _ExchangeRows.apply(x, sent, received, group))


class _SumGradients(torch.autograd.Function):
    """Identity forward, all-reduce backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous().clone(), ctx.group), None


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """`x`, which all members have alike and each uses in part: their gradients are summed."""
    return x if group.size == 1 else cast(Tensor, _SumGradients.apply(x, group))


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """The members' parts `x` [s / size, ...] of a sequence put together, for members that each use it in part: their
    gradients are summed."""
    return x if group.size == 1 else cast(Tensor, _GatherSequence.apply(x, group))


def reduce_from_group(x: Tensor, group: Group, *, sequence_parallel: bool = False) -> Tensor:
    """The sum of the members' `x` [s, ...]: whole on each, or with `sequence_parallel` each member's part of the first
    dimension."""
    if group.size == 1:
        return x
    function = _ReduceScatterSequence if sequence_parallel else _ReduceFromGroup
    return cast(Tensor, function.apply(x, group))
