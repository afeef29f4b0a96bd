"""Main gradients on their way from the layers to the shards.

Key idea: layers add to a bucket's gradients through sinks, which count. A bucket that has had all its contributions is
reduced over the data-parallel ranks: of the step where gradients are held whole, of each microbatch where they are
sharded, which keeps few of them whole at a time. With `overlap_reduce` the backward goes on meanwhile; without it
gradients that are held whole are reduced when the backward has ended. Buckets of a chunk start in a fixed
order on all ranks; whatever never got its last contribution is flushed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.optimizer.buckets import Bucket, Slot
from megalite.optimizer.sharding import Sharding
from megalite.optimizer.transport import Pending, Transport
from megalite.precision.policy import Precision

MAX_PENDING = 2  # reductions whose whole-bucket gradients may be alive at once, besides the one being filled

Recorder = Callable[[str, int, int, float, float], None]
"""Called with a collective's kind, chunk and bucket, and its begin and end in milliseconds of a monotonic clock."""


class _Sink:
    """`nn.gradients.GradientSink` of one slot."""

    def __init__(self, reducer: GradientReducer, state: _State, index: int):
        self._reducer, self._state, self._index = reducer, state, index
        self._slot = state.bucket.slots[index]

    def target(self) -> Tensor:
        return self._slot.view(self._reducer.whole_gradients(self._state))

    def arrived(self) -> None:
        self._reducer.arrived(self._state, self._index)


class _State:
    """A bucket between the first contribution and the reduction. `missing`: contributions that each slot still gets."""

    def __init__(self, bucket: Bucket, number: int):
        self.bucket, self.number = bucket, number
        self.missing: list[int] = []
        self.incomplete = 0
        self.temporary: Tensor | None = None
        self.started = False

    def expect(self, microbatches: int) -> None:
        self.missing = [slot.uses * microbatches for slot in self.bucket.slots]
        self.incomplete = sum(count > 0 for count in self.missing)
        self.started = False


class _Reduction(NamedTuple):
    """A reduction under way: its result, as a part of what is sent or of the gradients `whole`."""

    state: _State
    pending: Pending
    result: Tensor
    whole: Tensor


class GradientReducer:
    """Main gradients of one rank. Between `begin` and `finish` layers may add to them. `peak_elements`: the most that
    temporaries for sharded gradients held at a time."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport | None, how: Sharding, precision: Precision):
        """`transport`: None where one rank holds everything."""
        self._states = [_State(bucket, number) for number, bucket in enumerate(buckets)]
        self._transport, self._how, self._precision = transport, how, precision
        self.recorder: Recorder | None = None
        self._pending: list[_Reduction] = []
        self._spare: list[Tensor] = []
        self._open = 0  # elements of temporaries that are alive
        self.peak_elements = 0
        for state in self._states:
            for index, slot in enumerate(state.bucket.slots):
                self._connect(state, index, slot)

    def _connect(self, state: _State, index: int, slot: Slot) -> None:
        sink = _Sink(self, state, index)
        slot.parameter.gradient_sink = sink  # type: ignore[attr-defined]

        def move(parameter: Tensor) -> None:
            if parameter.grad is not None:  # None where the layer used the sink itself
                sink.target().add_(parameter.grad)
                parameter.grad = None
                sink.arrived()

        slot.parameter.register_post_accumulate_grad_hook(move)

    def begin(self, microbatches: int) -> None:
        """Clear the gradients; as many contributions come as `microbatches` make."""
        assert not self._pending, "the last step's reduction was not finished"
        for state in self._states:
            gradients = state.bucket.held_grads if state.bucket.grads is None else state.bucket.grads
            gradients.zero_()
            state.expect(1 if self._how.gradients else microbatches)

    def whole_gradients(self, state: _State) -> Tensor:
        """The bucket's gradients of its whole length, to be added to."""
        if state.bucket.grads is not None:
            assert not state.started, f"bucket {state.number} gets a gradient after its reduction has started"
            return state.bucket.grads
        if state.temporary is None:
            state.temporary = self._take(state.bucket)
        return state.temporary

    def _take(self, bucket: Bucket) -> Tensor:
        """A cleared temporary: fresh memory is expensive, so those that are done are used again."""
        self._open += bucket.size
        self.peak_elements = max(self.peak_elements, self._open)
        for at, spare in enumerate(self._spare):
            if spare.numel() >= bucket.size:
                return self._spare.pop(at)[: bucket.size].zero_()
        return torch.zeros(bucket.size, dtype=self._precision.wide, device=bucket.held_grads.device)

    def _give_back(self, temporary: Tensor) -> None:
        self._open -= temporary.numel()
        whole = temporary._base if temporary._base is not None else temporary
        self._spare.append(whole)
        self._spare.sort(key=Tensor.numel)
        if len(self._spare) > MAX_PENDING:
            self._spare.pop(0)

    def arrived(self, state: _State, index: int) -> None:
        """One contribution to the slot `index` is in."""
        state.missing[index] -= 1
        if state.missing[index] == 0:
            state.incomplete -= 1
            if state.incomplete == 0 and (self._how.overlap_reduce or self._how.gradients):
                self._start_ready(state.bucket.chunk)

    def _start_ready(self, chunk: int) -> None:
        """Start what is complete, up to the first bucket of the chunk that isn't."""
        for state in self._states:
            if state.bucket.chunk == chunk and not state.started:
                if state.incomplete:
                    break
                self._start(state)

    def flush(self, chunk: int) -> None:
        """The backward of one microbatch is through with `chunk`: sharded gradients are reduced, complete or not."""
        if not self._how.gradients:
            return
        for state in self._states:
            if state.bucket.chunk == chunk:
                if state.temporary is not None:
                    self._start(state)
                state.expect(1)

    def finish(self) -> None:
        """Start what hasn't, wait for all. Collective over the data-parallel ranks."""
        for state in self._states:
            waiting = state.temporary is not None if self._how.gradients else not state.started
            if waiting:
                self._start(state)
        self._wait(0)
        self._spare.clear()

    def _start(self, state: _State) -> None:
        """Start a bucket's reduction: of its own gradients, or of a temporary that is given up."""
        whole, state.temporary, state.started = self._to_reduce(state), None, True
        if self._transport is None:
            return
        sent = whole if self._precision.reduce == whole.dtype else whole.to(self._precision.reduce)
        result = sent[state.bucket.first : state.bucket.last]  # in place: what is sent isn't needed any more
        if self._how.state:
            pending = self._transport.reduce_scatter(result, sent)
        else:
            pending = self._transport.all_reduce(sent)
        self._pending.append(_Reduction(state, pending, result, whole))
        if self._how.gradients:
            self._wait(MAX_PENDING if self._how.overlap_reduce else 0)

    def _to_reduce(self, state: _State) -> Tensor:
        """What is to be reduced."""
        whole = state.temporary if self._how.gradients else state.bucket.grads
        assert whole is not None
        return whole

    def _wait(self, left: int) -> None:
        """Complete reductions, oldest first, until only `left` are under way."""
        while len(self._pending) > left:
            state, pending, result, whole = self._pending.pop(0)
            pending.wait()
            self._tell(state, pending)
            held = state.bucket.held_grads
            if self._how.gradients:
                held.add_(result)
                self._give_back(whole)
            elif result.data_ptr() != held.data_ptr():
                held.copy_(result)

    def _tell(self, state: _State, pending: Pending) -> None:
        if self.recorder is not None:
            kind = "reduce_scatter" if self._how.state else "all_reduce"
            self.recorder(kind, state.bucket.chunk, state.number, pending.begin, pending.end)
