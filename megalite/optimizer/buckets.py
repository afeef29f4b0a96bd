"""Parameters and main gradients in contiguous buckets.

Key idea: the trainable parameters of a chunk lie side by side in buckets, in the order in which a backward reaches
them, each aligned to 128 elements; a bucket is reduced, gathered and cut into equal shards as a whole, over the data
ranks of its parameters' domain. Inside a bucket, parameters with the same treatment are neighbours, so the update works
on a few contiguous segments.

Copies of a tied table on two stages are in buckets of their own: equal on both, so equal shards lie on equal ranks and
the sum over the copies can follow the reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megalite.distributed.layout import Domain
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec, Treatment
from megalite.distributed.pieces import Piece
from megalite.optimizer.sharding import Member, Sharding, Unit
from megalite.precision.policy import Precision

ALIGNMENT = 128
ROW = 4096
"""Large parameters, and shards of their buckets, begin at multiples of so many elements: see `gradient_norm`."""
LARGE = 1 << 17


@dataclass(frozen=True)
class Slot:
    """One parameter's range of a bucket."""

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.spec.local_shape)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the bucket's length, in its local shape."""
        return flat[self.start : self.stop].view(self.spec.local_shape)


class Bucket:
    """Flat tensors of one group of parameters, which are of one domain and one dtype.

    `number`: among all of this rank's. `first_unit`: of the units that use these parameters the one whose backward is
    last. `group`: the ranks over which it is reduced and gathered.

    `params`: whole, in the parameters' dtype; if they are sharded its storage comes and goes, and `held_params` stays.
    `grads`: whole, in the main gradients' dtype; None with sharded gradients. `first`, `last`: the range of the bucket
    that this rank updates; all of it where the state isn't sharded. `held_grads` and `held_params` are that range.
    """

    def __init__(
        self,
        number: int,
        chunk: int,
        first_unit: int,
        members: list[Member],
        mesh: Mesh,
        precision: Precision,
        sharding: Sharding,
    ):
        self.number, self.chunk, self.first_unit = number, chunk, first_unit
        self.domain = members[0][2].domain
        self.group = mesh.along(self.domain.data_axes)
        self.sharding = sharding = sharding.for_group_of(self.group.size)
        self.slots: list[Slot] = []
        end = 0
        treated_alike = sorted(members, key=lambda member: member[2].treatment.order)
        for name, parameter, spec in treated_alike:  # a stable sort
            slot = Slot(name, parameter, spec, _round_up(end, alignment_of(spec)))
            self.slots.append(slot)
            end = slot.stop
        ranks = self.group.size
        self.size = _round_up(end, max(alignment_of(slot.spec) for slot in self.slots) * ranks)
        share, rank = (self.size // ranks, self.group.rank) if sharding.state else (self.size, 0)
        self.first, self.last = share * rank, share * (rank + 1)
        self.params = torch.zeros(self.size, dtype=members[0][1].dtype, device=mesh.device)
        for slot in self.slots:
            if slot.parameter.untyped_storage().nbytes():  # else it was built without values
                slot.view(self.params).copy_(slot.parameter.detach())
            slot.parameter.data = slot.view(self.params)
        self.held_params = self.params[self.first : self.last]
        if sharding.parameters:
            self.held_params = self.held_params.clone()
            self.params.untyped_storage().resize_(0)
        held = self.last - self.first if sharding.gradients else self.size
        gradients = torch.zeros(held, dtype=precision.main_gradients, device=mesh.device)
        self.grads = None if sharding.gradients else gradients
        self.held_grads = gradients if sharding.gradients else gradients[self.first : self.last]

    @property
    def in_eight_bits(self) -> bool:
        """Whether its parameters are, which then have no meaning without their scales."""
        return self.params.element_size() == 1

    def treatment_runs(self) -> Iterator[tuple[Treatment, int, int]]:
        """(treatment, start, stop) of the runs of equal treatment in the held range, counted from its beginning."""
        stops = [*(slot.start for slot in self.slots[1:]), self.size]  # padding goes with what is before it
        ranges = zip(self.slots, stops, strict=True)
        for treatment, run in itertools.groupby(ranges, key=lambda slot_and_stop: slot_and_stop[0].spec.treatment):
            alike = list(run)
            low, high = max(alike[0][0].start, self.first), min(alike[-1][1], self.last)
            if low < high:
                yield treatment, low - self.first, high - self.first

    def pieces(self, flat: Tensor, offset: int = 0) -> Iterator[Piece]:
        """The parameters' parts of `flat`, which lies at `offset` of the held range."""
        begin = self.first + offset
        for slot in self.slots:
            low, high = max(slot.start, begin), min(slot.stop, begin + flat.numel())
            if low < high:
                part = flat[low - begin : high - begin]
                yield Piece(slot.name, part, low - slot.start, slot.spec, self.sharding.state)


def alignment_of(spec: ParamSpec) -> int:
    """Where a parameter may begin."""
    return ROW if prod(spec.local_shape) >= LARGE else ALIGNMENT


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def build_buckets(units: Sequence[Unit], mesh: Mesh, precision: Precision, sharding: Sharding) -> list[Bucket]:
    """Buckets of all parameters that require a gradient, chunk by chunk in the order of a backward."""
    first_units: dict[nn.Parameter, int] = {}
    for number, unit in enumerate(units):
        for _, parameter, _ in unit.members:
            if parameter.requires_grad:
                first_units.setdefault(parameter, number)
    buckets: list[Bucket] = []
    for chunk in sorted({unit.chunk for unit in units}):
        numbers = [number for number, unit in enumerate(units) if unit.chunk == chunk]
        backward = [
            [member for member in reversed(units[number].members) if first_units.get(member[1]) == number]
            for number in reversed(numbers)
        ]
        for members in _groups(backward, sharding):
            first_unit = min(first_units[parameter] for _, parameter, _ in members)
            buckets.append(Bucket(len(buckets), chunk, first_unit, members, mesh, precision, sharding))
    return buckets


def _groups(units: Sequence[Sequence[Member]], sharding: Sharding) -> Iterator[list[Member]]:
    """The members of each bucket, from those of a chunk's units in the order of a backward."""
    open_: dict[tuple[Domain, torch.dtype], list[Member]] = {}
    for members in units:
        for member in members:
            spec = member[2]
            if len(spec.stages) > 1:
                yield [member]
                continue
            kind = spec.domain, member[1].dtype
            group = open_.setdefault(kind, [])
            group.append(member)
            elements = sum(prod(spec.local_shape) for _, _, spec in group)
            if sharding.bucket_size is not None and elements >= sharding.bucket_size:
                yield open_.pop(kind)
        if sharding.parameters:
            yield from open_.values()
            open_.clear()
    yield from open_.values()
