"""Parameters on their way from the shards to the layers.

Key idea: parameters that are whole on every rank are gathered once after an update; with `overlap_gather` a layer waits
for its own only when it is called. Sharded parameters are gathered unit by unit for their use, forward and backward,
into a storage that comes and goes, so views and saved tensors stay valid. At most two units are there at a time: the
one at work, and the next one, whose gather overlaps with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megalite.optimizer.buckets import Bucket
from megalite.optimizer.reduction import Recorder
from megalite.optimizer.sharding import Sharding, Unit
from megalite.optimizer.transport import Pending, Transport


class Gatherer:
    """Base: what gathers share. `recorder` as in `GradientReducer`."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport):
        self.buckets, self.transport = list(buckets), transport
        self.recorder: Recorder | None = None
        self._pending: dict[int, Pending] = {}

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        self._pending[number] = self.transport.all_gather(bucket.params, bucket.held_params)

    def _wait(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        pending.wait()
        if self.recorder is not None:
            self.recorder("all_gather", self.buckets[number].chunk, number, pending.begin, pending.end)

    def settle(self) -> None:
        """Wait for all gathers under way."""
        for number in list(self._pending):
            self._wait(number)


class WholeGatherer(Gatherer):
    """Gathers parameters that every rank holds whole, after each update."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, units: Sequence[Unit], how: Sharding):
        super().__init__(buckets, transport)
        self._overlap = how.overlap_gather
        if self._overlap:
            for unit, numbers in zip(units, buckets_of(units, buckets), strict=True):
                unit.module.register_forward_pre_hook(self._hook(numbers))

    def _hook(self, numbers: list[int]) -> Any:
        def wait(*_: object) -> None:
            for number in numbers:
                self._wait(number)

        return wait

    def updated(self) -> None:
        """Each rank's part is new: gather, in the order in which a forward needs them."""
        for number in reversed(range(len(self.buckets))):
            self._start(number)
        if not self._overlap:
            self.settle()


class UnitGatherer(Gatherer):
    """Gathers sharded parameters for the unit at work, and with `overlap_gather` ahead for the next one.

    `forward_begins` and `backward_begins` tell the direction in which units follow. `peak_elements`: most gathered
    parameters at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, units: Sequence[Unit], how: Sharding):
        super().__init__(buckets, transport)
        self._units, self._ahead = units, how.overlap_gather
        self._numbers = buckets_of(units, buckets)
        self._gathered: set[int] = set()
        self._backward = False
        self.peak_elements = 0
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._before_forward(index))
            if unit.backward_reads:
                unit.module.register_forward_hook(self._before_backward(index))

    def forward_begins(self) -> None:
        self._backward = False

    def backward_begins(self) -> None:
        self._backward = True

    def _before_forward(self, index: int) -> Any:
        def use(*_: object) -> None:
            # Within a backward this is a recomputation: what comes next is not the next unit's forward.
            self._use(index, None if self._backward else self._neighbour(index, 1))

        return use

    def _before_backward(self, index: int) -> Any:
        def hook(gradient: Tensor) -> None:
            self._use(index, self._neighbour(index, -1))

        def attach(module: object, args: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(hook)

        return attach

    def _neighbour(self, index: int, step: int) -> int | None:
        """The unit after or before this one in its chunk, if that is used then."""
        other = index + step
        if not self._ahead or not 0 <= other < len(self._units) or self._units[other].chunk != self._units[index].chunk:
            return None
        return other if step > 0 or self._units[other].backward_reads else None

    def _use(self, index: int, following: int | None) -> None:
        """Have a unit's parameters here, and those of the following one coming."""
        wanted = self._numbers[index] + ([] if following is None else self._numbers[following])
        for number in self._gathered - set(wanted):
            if len(wanted) > len(self._numbers[index]) or not set(self._numbers[index]) <= self._gathered:
                self._release(number)
        for number in wanted:
            if number not in self._gathered:
                self._gather(number)
        for number in self._numbers[index]:
            self._wait(number)

    def _gather(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.params.untyped_storage().resize_(bucket.size * bucket.params.element_size())
        self._gathered.add(number)
        self.peak_elements = max(self.peak_elements, sum(self.buckets[n].size for n in self._gathered))
        self._start(number)

    def _release(self, number: int) -> None:
        self._wait(number)
        self._gathered.discard(number)
        self.buckets[number].params.untyped_storage().resize_(0)

    def updated(self) -> None:
        """Each rank's part is new: what was gathered is out of date."""
        for number in list(self._gathered):
            self._release(number)


def buckets_of(units: Sequence[Unit], buckets: Sequence[Bucket]) -> list[list[int]]:
    """For each unit, the numbers of the buckets that hold its parameters."""
    place = {slot.parameter: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
    return [sorted({place[parameter] for _, parameter, _ in unit.members if parameter in place}) for unit in units]
