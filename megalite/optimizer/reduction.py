"""Main gradients on their way from the layers to the shards.

Key idea: layers add to a bucket's gradients through sinks. Completion is counted in units (layers): a backward goes
through those of a chunk from the last to the first, on all ranks alike, and it reaches a unit's input only after all
gradients inside, also where a parameter got none. A bucket whose units are all through is reduced over the data ranks
of its domain: of the step where gradients are held whole, of each microbatch where they are sharded, which keeps few of
them whole at a time. With `overlap_reduce` the backward goes on meanwhile; without it gradients that are held whole are
reduced when the backward has ended. All reductions start in one order on all ranks, which NCCL requires even across
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.optimizer.buckets import Bucket, Slot
from megalite.optimizer.sharding import Sharding, Unit
from megalite.optimizer.transport import TimedPending, Transport
from megalite.precision.policy import Precision

MAX_STARTS = 2  # groups of reductions started together that may be under way, so that their temporaries are alive

Recorder = Callable[[str, int, int, float, float], None]
"""Called with a collective's kind, chunk and bucket, and its begin and end in milliseconds of a monotonic clock."""


class _Sink(NamedTuple):
    """`nn.gradients.GradientSink` of one slot."""

    reducer: GradientReducer
    bucket: Bucket
    slot: Slot

    def target(self) -> Tensor:
        return self.slot.view(self.reducer.whole_gradients(self.bucket))

    def move(self, parameter: Tensor) -> None:
        """Take the gradient that autograd has put beside the parameter; none where the layer used the sink itself."""
        if parameter.grad is not None:
            self.target().add_(parameter.grad)
            parameter.grad = None


class _Reduction(NamedTuple):
    """A reduction under way: its result, as a part of what is sent or of the gradients `whole`."""

    bucket: Bucket
    pending: TimedPending
    result: Tensor
    whole: Tensor


class GradientReducer:
    """Main gradients of one rank. Between `begin` and `finish` layers may add to them. `peak_elements`: the most that
    temporaries for sharded gradients held at a time."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        units: Sequence[Unit],
        transport: Transport,
        precision: Precision,
        sharding: Sharding,
    ):
        self._buckets, self._transport, self._precision = buckets, transport, precision
        self._overlap = sharding.overlap_reduce
        self.recorder: Recorder | None = None
        self._left: dict[int, int] = {}  # by chunk, microbatches whose backward has not ended
        self._started: set[Bucket] = set()  # in this step, or microbatch
        self._pending: list[list[_Reduction]] = []  # what started together
        self._temporaries: dict[Bucket, Tensor] = {}
        self._spare: list[Tensor] = []
        self._open = 0  # elements of temporaries that are alive
        self.peak_elements = 0
        for bucket in buckets:
            for slot in bucket.slots:
                sink = _Sink(self, bucket, slot)
                slot.parameter.gradient_sink = sink  # type: ignore[attr-defined]
                slot.parameter.register_post_accumulate_grad_hook(sink.move)
        if sharding.overlap_reduce or sharding.gradients:
            for number, unit in enumerate(units):
                unit.module.register_forward_pre_hook(self._watch(number, unit))

    def _watch(self, number: int, unit: Unit) -> Any:
        """A hook that learns when a unit's backward is through: autograd goes on to what made the unit's input only
        after all that was computed from it. Where the input is a leaf (of a stage's first unit) no hook can tell:
        `backward_ended` does."""

        def through() -> None:
            self._units_through(unit.chunk, number)

        def watch(_: object, args: tuple[Any, ...]) -> None:
            if args[0].grad_fn is not None:
                args[0].register_hook(lambda _: unit.when_weight_gradients_done(through))

        return watch

    def begin(self, microbatches: int) -> None:
        """Clear the gradients before the backwards of so many microbatches."""
        assert not self._pending, "the last step's reduction was not finished"
        for bucket in self._buckets:
            (bucket.held_grads if bucket.grads is None else bucket.grads).zero_()
        self._left = dict.fromkeys((bucket.chunk for bucket in self._buckets), microbatches)
        self._started.clear()

    def whole_gradients(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients of its whole length, to be added to."""
        assert bucket not in self._started, f"bucket {bucket.number} gets a gradient after its reduction"
        if bucket.grads is not None:
            return bucket.grads
        if bucket not in self._temporaries:
            self._temporaries[bucket] = self._take(bucket)
        return self._temporaries[bucket]

    def _take(self, bucket: Bucket) -> Tensor:
        """A cleared temporary: fresh memory is expensive, so those that are done are used again."""
        self._open += bucket.size
        self.peak_elements = max(self.peak_elements, self._open)
        for at, spare in enumerate(self._spare):
            if spare.numel() >= bucket.size:
                return self._spare.pop(at)[: bucket.size].zero_()
        if self._spare:
            self._spare.pop(0)  # too small: what is kept stays within what was needed at some time
        return torch.zeros(bucket.size, dtype=bucket.held_grads.dtype, device=bucket.held_grads.device)

    def _give_back(self, temporary: Tensor) -> None:
        self._open -= temporary.numel()
        whole = temporary._base if temporary._base is not None else temporary
        self._spare.append(whole)
        self._spare.sort(key=Tensor.numel)

    def _units_through(self, chunk: int, first: int) -> None:
        """The backward of a microbatch is through with the units of `chunk` from the one numbered `first` on."""
        last = self._overlap and self._left.get(chunk) == 1
        done = [b for b in self._buckets if b.chunk == chunk and b.first_unit >= first and b not in self._started]
        self._start([bucket for bucket in done if last or bucket.sharding.gradients])

    def backward_ended(self, chunk: int) -> None:
        """The backward of one microbatch is through with `chunk`."""
        self._units_through(chunk, 0)
        if chunk in self._left:
            self._left[chunk] -= 1
        self._started -= {b for b in self._buckets if b.chunk == chunk and b.sharding.gradients}

    def finish(self) -> None:
        """Start what hasn't, wait for all. Collective over the data ranks."""
        self._start([b for b in self._buckets if b.grads is not None and b not in self._started])
        self._wait(0)
        assert not self._temporaries, "a gradient came after its chunk's backward"
        self._spare.clear()

    def _start(self, buckets: Sequence[Bucket]) -> None:
        """Start reductions of the buckets' own gradients, or of temporaries that are given up."""
        shared = [bucket for bucket in buckets if bucket.group.size > 1]
        if shared:
            self._pending.append([self._reduce(bucket) for bucket in shared])
        if any(bucket.sharding.gradients for bucket in shared):
            self._wait(MAX_STARTS if self._overlap else 0)
        self._started.update(buckets)

    def _reduce(self, bucket: Bucket) -> _Reduction:
        whole = self.whole_gradients(bucket)
        self._temporaries.pop(bucket, None)
        sent = whole if self._precision.reduce == whole.dtype else whole.to(self._precision.reduce)
        result = sent[bucket.first : bucket.last]  # in place: what is sent isn't needed any more
        if bucket.sharding.state:
            pending = self._transport.reduce_scatter(result, sent, bucket.group)
        else:
            pending = self._transport.all_reduce(sent, bucket.group)
        return _Reduction(bucket, pending, result, whole)

    def _wait(self, left: int) -> None:
        """Complete reductions, oldest first, until only those of the `left` last starts are under way."""
        while len(self._pending) > left:
            for bucket, pending, result, whole in self._pending.pop(0):
                pending.wait()
                if self.recorder is not None:
                    kind = "reduce_scatter" if bucket.sharding.state else "all_reduce"
                    self.recorder(kind, bucket.chunk, bucket.number, pending.begin, pending.end)
                if bucket.sharding.gradients:
                    bucket.held_grads.add_(result)
                    self._give_back(whole)
                elif result.data_ptr() != bucket.held_grads.data_ptr():
                    bucket.held_grads.copy_(result)
