"""Parameters on their way from the shards to the layers.

Key idea: parameters that are whole on every rank are gathered once after an update; with `overlap_gather` a layer waits
for its own only when it is called. Sharded parameters are gathered unit by unit for their use, forward and backward,
into a storage that comes and goes, so views and saved tensors stay valid. At most two units are there at a time: the
one at work, and the next one, whose gather overlaps with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.optimizer.buckets import Bucket
from megalite.optimizer.reduction import Recorder
from megalite.optimizer.sharding import Sharding, Unit
from megalite.optimizer.transport import TimedPending, Transport


class Gatherer:
    """Base: what gathers share. `recorder` as in `GradientReducer`. `in_backward`: what a chunk runs at present.
    `peak_elements`, `peak_bytes`: most sharded parameters that were gathered at a time."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, units: Sequence[Unit], sharding: Sharding):
        self.buckets = [bucket for bucket in buckets if bucket.sharding.state]
        self.transport, self.units, self.overlap = transport, units, sharding.overlap_gather
        self.recorder: Recorder | None = None
        self.in_backward, self.peak_elements, self.peak_bytes = False, 0, 0
        self._pending: dict[Bucket, TimedPending] = {}
        holding = {slot.parameter: bucket for bucket in self.buckets for slot in bucket.slots}
        self.buckets_of = [
            list(dict.fromkeys(holding[parameter] for _, parameter, _ in unit.members if parameter in holding))
            for unit in units
        ]

    def _start(self, bucket: Bucket) -> None:
        whole, mine = bucket.params, bucket.held_params
        if bucket.in_eight_bits:  # communication libraries know no formats of eight bits
            whole, mine = whole.view(torch.uint8), mine.view(torch.uint8)
        self._pending[bucket] = self.transport.all_gather(whole, mine, bucket.group)

    def _wait(self, bucket: Bucket) -> None:
        pending = self._pending.pop(bucket, None)
        if pending is None:
            return
        pending.wait()
        if self.recorder is not None:
            self.recorder("all_gather", bucket.chunk, bucket.number, pending.begin, pending.end)

    def finish(self) -> None:
        """Wait for all gathers under way."""
        for bucket in list(self._pending):
            self._wait(bucket)


class WholeGatherer(Gatherer):
    """Gathers parameters that every rank holds whole, after each update; nothing where each updates all."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, units: Sequence[Unit], sharding: Sharding):
        super().__init__(buckets, transport, units, sharding)
        if self.overlap:
            for index, unit in enumerate(units):
                unit.module.register_forward_pre_hook(self._before_forward(index))

    def _before_forward(self, index: int) -> Any:
        def wait(*_: object) -> None:
            for bucket in self.buckets_of[index]:
                self._wait(bucket)

        return wait

    def updated(self) -> None:
        """Each rank's part is new: gather, in the order in which a forward needs them."""
        for bucket in reversed(self.buckets):
            self._start(bucket)
        if not self.overlap:
            self.finish()

    def parameters_changed(self) -> None:
        """Every rank has filled the whole parameters; but of those in eight bits, which are rounded from main
        parameters, its part alone."""
        for bucket in self.buckets:
            if bucket.in_eight_bits:
                self._start(bucket)
        self.finish()


class UnitGatherer(Gatherer):
    """Gathers sharded parameters for the unit at work, and with `overlap_gather` ahead for the next one."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, units: Sequence[Unit], sharding: Sharding):
        super().__init__(buckets, transport, units, sharding)
        self._gathered: list[Bucket] = []
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._before_forward(index))
            if unit.backward_reads:
                unit.module.register_forward_hook(self._before_backward(index))

    def _before_forward(self, index: int) -> Any:
        def use(*_: object) -> None:
            # Within a backward this is a recomputation: what comes next is not the next unit's forward.
            self._use(index, None if self.in_backward else self._neighbour(index, 1))

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
        if not self.overlap or not 0 <= other < len(self.units) or self.units[other].chunk != self.units[index].chunk:
            return None
        return other if step > 0 or self.units[other].backward_reads else None

    def _use(self, index: int, following: int | None) -> None:
        """Have a unit's parameters here, and those of the following one coming."""
        needed, ahead = self.buckets_of[index], [] if following is None else self.buckets_of[following]
        if ahead or any(bucket not in self._gathered for bucket in needed):
            for bucket in [bucket for bucket in self._gathered if bucket not in needed and bucket not in ahead]:
                self._release(bucket)
        for bucket in [*needed, *ahead]:
            if bucket not in self._gathered:
                self._gather(bucket)
        for bucket in needed:
            self._wait(bucket)

    def _gather(self, bucket: Bucket) -> None:
        bucket.params.untyped_storage().resize_(bucket.size * bucket.params.element_size())
        self._gathered.append(bucket)
        self.peak_elements = max(self.peak_elements, sum(bucket.size for bucket in self._gathered))
        self.peak_bytes = max(self.peak_bytes, sum(bucket.params.nbytes for bucket in self._gathered))
        self._start(bucket)

    def _release(self, bucket: Bucket) -> None:
        self._wait(bucket)
        self._gathered.remove(bucket)
        bucket.params.untyped_storage().resize_(0)

    def parameters_changed(self) -> None:
        """Each rank's part is new: what was gathered is out of date."""
        for bucket in list(self._gathered):
            self._release(bucket)

    updated = parameters_changed
