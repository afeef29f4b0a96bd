"""Parameters and main gradients in contiguous buckets.

Key idea: the trainable parameters of a chunk lie side by side in buckets, in the order in which a backward reaches
them, each aligned to 128 elements; a bucket is reduced, gathered and cut into equal shards as a whole. Inside a bucket,
parameters with the same treatment (weight decay, learning-rate group) are neighbours, so the update works on a few
contiguous segments.

Copies of a tied table on two stages are in buckets of their own: equal on both, so equal shards lie on equal ranks and
the sum over the copies can follow the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.distributed.pieces import Piece
from megalite.optimizer.sharding import Member, Sharding, Unit
from megalite.precision.policy import Precision

ALIGNMENT = 128
ROW = 4096
"""Large parameters, and shards of their buckets, begin at multiples of so many elements: see `gradient_norm`."""
LARGE = 1 << 17


@dataclass(frozen=True)
class Slot:
    """One parameter's range of a bucket. `uses`: gradient contributions of one microbatch."""

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    start: int
    uses: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.spec.local_shape)

    @property
    def treatment(self) -> tuple[bool, str]:
        """Weight decay or not, learning-rate group."""
        return self.spec.weight_decay, self.spec.lr_group

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the bucket's length, in its local shape."""
        return flat[self.start : self.stop].view(self.spec.local_shape)


class Bucket:
    """Flat tensors of one group of parameters.

    `params`: whole, in the compute dtype; with sharded parameters its storage comes and goes, and `held_params` stays.
    `grads`: whole, in the wide dtype; None with sharded gradients. `first`, `last`: the range of the bucket that this
    rank updates; all of it where the state isn't sharded. `held_grads` and `held_params` are that range.
    """

    def __init__(self, chunk: int, members: list[tuple[Member, int]], mesh: Mesh, precision: Precision, how: Sharding):
        self.chunk, self.sharding = chunk, how
        self.slots: list[Slot] = []
        end = 0
        by_treatment = sorted(members, key=lambda item: (not item[0][2].weight_decay, item[0][2].lr_group))
        for (name, parameter, spec), uses in by_treatment:  # a stable sort
            slot = Slot(name, parameter, spec, _round_up(end, alignment_of(spec)), uses)
            self.slots.append(slot)
            end = slot.stop
        ranks = mesh.dp_cp.size
        self.size = _round_up(end, max(alignment_of(slot.spec) for slot in self.slots) * ranks)
        share, rank = (self.size // ranks, mesh.dp_cp.rank) if how.state else (self.size, 0)
        self.first, self.last = share * rank, share * (rank + 1)
        self.params = torch.zeros(self.size, dtype=precision.compute, device=mesh.device)
        for slot in self.slots:
            if slot.parameter.untyped_storage().nbytes():  # else it was built without values
                slot.view(self.params).copy_(slot.parameter.detach())
            slot.parameter.data = slot.view(self.params)
        self.held_params = self.params[self.first : self.last]
        if how.parameters:
            self.held_params = self.held_params.clone()
            self.params.untyped_storage().resize_(0)
        held = self.last - self.first if how.gradients else self.size
        gradients = torch.zeros(held, dtype=precision.wide, device=mesh.device)
        self.grads = None if how.gradients else gradients
        self.held_grads = gradients if how.gradients else gradients[self.first : self.last]

    def segments(self) -> Iterator[tuple[tuple[bool, str], int, int]]:
        """(treatment, start, stop) of the runs of equal treatment in the held range, counted from its beginning."""
        starts = [0, *(b.start for a, b in zip(self.slots, self.slots[1:], strict=False) if a.treatment != b.treatment)]
        for start, stop in zip(starts, [*starts[1:], self.size], strict=True):
            treatment = next(slot.treatment for slot in self.slots if slot.start == start)
            low, high = max(start, self.first), min(stop, self.last)
            if low < high:
                yield treatment, low - self.first, high - self.first

    def pieces(self, flat: Tensor, offset: int = 0) -> Iterator[tuple[Slot, Piece]]:
        """The parameters' parts of `flat`, which lies at `offset` of the held range."""
        begin = self.first + offset
        for slot in self.slots:
            low, high = max(slot.start, begin), min(slot.stop, begin + flat.numel())
            if low < high:
                part = flat[low - begin : high - begin]
                yield slot, Piece(slot.name, part, low - slot.start, slot.spec, self.sharding.state)


def alignment_of(spec: ParamSpec) -> int:
    """Where a parameter may begin."""
    return ROW if prod(spec.local_shape) >= LARGE else ALIGNMENT


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def build_buckets(units: Sequence[Unit], mesh: Mesh, precision: Precision, how: Sharding) -> list[Bucket]:
    """Buckets of all parameters that require a gradient, chunk by chunk in the order of a backward."""
    groups = _groups(units, how)
    return [Bucket(chunk, members, mesh, precision, how) for chunk, members in groups]


def _groups(units: Sequence[Unit], how: Sharding) -> Iterator[tuple[int, list[tuple[Member, int]]]]:
    """(chunk, its members with their uses) of each bucket."""
    for chunk in sorted({unit.chunk for unit in units}):
        mine = [unit for unit in units if unit.chunk == chunk]
        uses: dict[nn.Parameter, int] = {}
        owned: list[list[Member]] = []
        for unit in mine:
            trainable = [member for member in unit.members if member[1].requires_grad]
            owned.append([member for member in trainable if member[1] not in uses])
            for _, parameter, _ in trainable:
                uses[parameter] = uses.get(parameter, 0) + 1
        open_: list[tuple[Member, int]] = []
        for members in reversed(owned):
            for member in reversed(members):
                counted = (member, uses[member[1]])
                if len(member[2].stages) > 1:
                    yield chunk, [counted]
                    continue
                open_.append(counted)
                if not how.parameters and how.bucket_size is not None and _elements(open_) >= how.bucket_size:
                    yield chunk, open_
                    open_ = []
            if how.parameters and open_:
                yield chunk, open_
                open_ = []
        if open_:
            yield chunk, open_


def _elements(members: list[tuple[Member, int]]) -> int:
    return sum(prod(spec.local_shape) for (_, _, spec), _ in members)
