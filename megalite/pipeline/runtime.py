"""Executes one rank's list of actions in order.

Key idea: the runtime knows neither model nor schedule. What a forward or backward means is the executor's business; the
order is the list's; between the two, the runtime hands over what stages send each other. Recorders, where given, note
when each action began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from megalite.pipeline.lowering import RECEIVES, RECV_FORWARD, SEND_BACKWARD, SEND_FORWARD, SENDS, WAITS
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from megalite.pipeline.transport import ProcessGroupTransport, Shapes, Tensors


class Executor(Protocol):
    """Computes. What crosses a stage boundary is a dict of named tensors, an open set.

    Outputs are sent and let go: the executor keeps what its backward needs, not the output itself
    (`torch.autograd.graph.get_gradient_edge`). Each floating-point output gets a gradient from the next stage, and each
    floating-point input must be given one.
    """

    def expected_inputs(self, chunk: int, microbatch: int) -> Shapes:
        """Names, shapes and dtypes of the tensors that come from the previous stage. Every rank reads its own
        microbatches, so it knows."""
        ...

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None = None) -> Tensors | None:
        """Run a chunk on a microbatch and keep what its backward needs. `inputs`: from the previous stage, without a
        graph; left out on the first one. The last stage returns None."""
        ...

    def backward(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        """Accumulate the gradients of a chunk for a microbatch and release what its forward kept. Takes the gradients
        of the outputs (left out on the last stage), returns those of the inputs (None on the first)."""
        ...

    def backward_input(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        """As `backward`, but leave to `backward_weight` all that isn't needed for the gradients of the inputs."""
        ...

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """The rest of the backward."""
        ...


Recorder = Callable[[Action, float, float], None]
"""Called with an action and its begin and end in milliseconds of a monotonic clock."""


class PipelineRuntime:
    """Runs lists of actions on an executor. `peak_live`: the most (chunk, microbatch) pairs whose activations this rank
    held at once in the last run, from forward until backward, or weight gradient where that is split."""

    def __init__(
        self,
        executor: Executor,
        recorders: Sequence[Recorder] = (),
        wait: Callable[[], None] | None = None,
        transport: ProcessGroupTransport | None = None,
    ):
        """`wait`: called before a time is taken, so that work queued on a device is counted where it belongs. It may
        wait for the current stream alone: another one may hold a receive that ends only after later actions.
        `transport`: needed where there is more than one stage."""
        self.executor = executor
        self.recorders, self.wait = recorders, wait
        self.transport = transport
        self.peak_live = 0
        self.handlers: dict[str, Callable[[Action], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            BACKWARD_INPUT: self._backward,
            BACKWARD_WEIGHT: self._backward_weight,
            **dict.fromkeys(RECEIVES.values(), self._receive),
            **dict.fromkeys(WAITS.values(), self._wait_for),
            **dict.fromkeys(SENDS.values(), self._send),
        }
        self._start([])

    def _start(self, actions: list[Action]) -> None:
        self.peak_live = 0
        self._trains = any(action.kind in (BACKWARD, BACKWARD_WEIGHT) for action in actions)
        self._live: set[tuple[int, int]] = set()  # (chunk, microbatch)
        self._held: dict[Action, Tensors] = {}  # what a wait brought or a send is to take
        self._grad_shapes: dict[tuple[int, int], Shapes] = {}

    def run(self, actions: Iterable[Action]) -> None:
        """Execute `actions`, a rank's list of a lowered schedule, in order. An unknown kind raises a KeyError."""
        actions = list(actions)
        self._start(actions)
        for action in actions:
            begin = self._now()
            self.handlers[action.kind](action)
            if self.recorders:
                end = self._now()
                for recorder in self.recorders:
                    recorder(action, begin, end)
        if self.transport is not None:
            self.transport.finish()

    def _forward(self, action: Action) -> None:
        key = action.chunk, action.microbatch
        outputs = self.executor.forward(*key, *self._received(action))
        if outputs is not None:
            self._held[action._replace(kind=SEND_FORWARD)] = outputs
            shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in outputs.items()}
            self._grad_shapes[key] = _floating(shapes)
        if self._trains:
            self._live.add(key)
        self.peak_live = max(self.peak_live, len(self._live))

    def _backward(self, action: Action) -> None:
        key = action.chunk, action.microbatch
        compute = self.executor.backward if action.kind == BACKWARD else self.executor.backward_input
        grads = compute(*key, *self._received(action))
        if grads is not None:
            self._held[action._replace(kind=SEND_BACKWARD)] = grads
        if action.kind == BACKWARD:
            self._live.discard(key)

    def _backward_weight(self, action: Action) -> None:
        self.executor.backward_weight(action.chunk, action.microbatch)
        self._live.discard((action.chunk, action.microbatch))

    def _received(self, action: Action) -> list[Tensors]:
        """What came for an action; empty at the ends of the model, where nothing comes."""
        wait = action._replace(kind=WAITS[action.kind])
        return [self._held.pop(wait)] if wait in self._held else []

    def _receive(self, action: Action) -> None:
        key = action.chunk, action.microbatch
        shapes = self.executor.expected_inputs(*key) if action.kind == RECV_FORWARD else self._grad_shapes.pop(key)
        self._carrier.post(action, shapes)

    def _wait_for(self, action: Action) -> None:
        self._held[action] = self._carrier.wait(action)

    def _send(self, action: Action) -> None:
        tensors = self._held.pop(action)
        if action.kind == SEND_BACKWARD:
            wanted = _floating(self.executor.expected_inputs(action.chunk, action.microbatch))
            if set(tensors) != set(wanted):  # the previous stage would wait for ever
                raise ValueError(f"{action}: gradients of {sorted(tensors)} where the inputs are {sorted(wanted)}")
        self._carrier.send(action, tensors)

    @property
    def _carrier(self) -> ProcessGroupTransport:
        assert self.transport is not None, "stages that send to each other need a transport"
        return self.transport

    def _now(self) -> float:
        if self.recorders and self.wait is not None:
            self.wait()
        return time.perf_counter() * 1e3


def _floating(shapes: Shapes) -> Shapes:
    """Those that have gradients."""
    return {name: (shape, dtype) for name, (shape, dtype) in shapes.items() if dtype.is_floating_point}
