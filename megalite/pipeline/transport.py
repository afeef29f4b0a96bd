"""Moves named tensors between pipeline stages.

Key idea: a lane leads from one rank to a neighbour and delivers in order (see `lowering.py`), so neither address nor
shape travels: the receiver knows both. Everything is asynchronous; a tensor is kept until it has left, and no longer.

gloo has tags, so there a lane is a tag. NCCL has none: what two ranks do in one process group runs in the order of the
calls, and a receive posted early would hold up a send in the other direction, perhaps for ever. So there a lane is a
process group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Group
from megalite.pipeline.lowering import Message, message_of
from megalite.pipeline.schedules import Action

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
MOST_AHEAD = 2


class ProcessGroupTransport:
    """Executes the communication of a lowered list (`lowering.py`) between the ranks of a pipeline of `chunks` model
    chunks a rank. Only `wait` and `finish` block.

    Where the group is on NCCL, making one is collective over it; `timeout` is that of the process groups made for it.
    """

    def __init__(self, group: Group, chunks: int, device: torch.device, *, timeout: timedelta | None = None):
        self.group, self.chunks, self.device = group, chunks, device
        self._posted: dict[Message, tuple[Tensors, list[dist.Work]]] = {}
        self._kept: dict[Message, Tensors] = {}  # in a pipeline of one, from the rank to itself
        ends = (False, True) if chunks > 1 else (False,)
        routes = [_Route(onward, around) for around in ends for onward in (True, False)]
        self._lead = _HostLead(_mark_stream) if device.type == "cuda" else None
        self._lanes = {} if group.process_group is None else _open_lanes(routes, group, device, timeout)

    def send(self, action: Action, tensors: Tensors) -> None:
        """Start to send. The tensors mustn't be written to afterwards; the caller needn't keep them."""
        message = self._message(action)
        if not self._lanes:
            self._kept[message] = {name: tensor.detach() for name, tensor in tensors.items()}
            return
        lane = self._lanes[self._route(message)]
        for name in sorted(tensors):
            lane.send(tensors[name].detach().contiguous(), message.target % self.group.size)
        if self._lead is not None:
            self._lead.advance()
        self.release()

    def post(self, action: Action, shapes: Shapes) -> None:
        """Get ready to receive tensors: exactly those that are sent."""
        message = self._message(action)
        if not self._lanes:
            return
        lane, source = self._lanes[self._route(message)], message.source % self.group.size
        tensors = {name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=self.device) for name in shapes}
        self._posted[message] = tensors, [lane.receive(tensors[name], source) for name in sorted(tensors)]

    def wait(self, action: Action) -> Tensors:
        """What `post` got ready for, once it is here."""
        message = self._message(action)
        if not self._lanes:
            return self._kept.pop(message)
        tensors, works = self._posted.pop(message)
        for work in works:
            work.wait()
        self.release()
        return tensors

    def release(self) -> None:
        """Let go of the tensors that have left."""
        for lane in self._lanes.values():
            lane.release()

    def finish(self) -> None:
        """Return once everything that was sent has left."""
        for lane in self._lanes.values():
            lane.release(everything=True)

    def _message(self, action: Action) -> Message:
        message = message_of(action, self.group.rank, self.group.size, self.chunks)
        assert message is not None, f"{action}: the model has no stage there"
        return message

    def _route(self, message: Message) -> _Route:
        around = message.source // self.group.size != message.target // self.group.size
        return _Route(message.source < message.target, around)


class _Route(NamedTuple):
    """Which way messages go: onward (activations) or back (gradients), between neighbours or around between the ends of
    the ring of ranks."""

    onward: bool
    around: bool

    def target(self, source: int, size: int) -> int | None:
        """The rank to which `source` sends along this route."""
        target = source + 1 if self.onward else source - 1
        return target % size if (not 0 <= target < size) == self.around else None


class _Sending(NamedTuple):
    """A tensor on its way. `left` says whether it has left; `wait` waits for that and raises what went wrong."""

    tensor: Tensor
    left: Callable[[], bool]
    wait: Callable[[], object]


class _HostLead:
    """Bounds how far the host runs ahead of its device: by `MOST_AHEAD` messages. A host may queue a whole step at
    once; all that it sends would then be kept until it sees that the device has sent it, whatever the schedule says.

    The host waits for what its device computes before an earlier message, never for the message itself, whose receiver
    may need something from this rank first. `mark` marks the present end of the device's queue and returns what waits
    until the device is there.
    """

    def __init__(self, mark: Callable[[], Callable[[], object]]):
        self._mark = mark
        self._marks: deque[Callable[[], object]] = deque()

    def advance(self) -> None:
        """One more message is queued."""
        self._marks.append(self._mark())
        if len(self._marks) > MOST_AHEAD:
            self._marks.popleft()()


def _mark_stream() -> Callable[[], object]:
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize


class _Lane:
    """A rank's two lanes along one route: it sends to one neighbour and receives from the other."""

    def __init__(self, process_group: dist.ProcessGroup, tag: int):
        self.process_group, self.tag = process_group, tag
        self.sending: deque[_Sending] = deque()
        # Only by waiting does gloo tell that a tensor has left. The thread does nothing else.
        self.waiter = None if _on_nccl(process_group) else ThreadPoolExecutor(1, thread_name_prefix="pipeline-send")

    def send(self, tensor: Tensor, target: int) -> None:
        """Start to send `tensor`, which is kept until it has left."""
        work = dist.isend(tensor, group=self.process_group, group_dst=target, tag=self.tag)
        assert work is not None
        if self.waiter is None:
            self.sending.append(_Sending(tensor, work.is_completed, work.wait))
        else:
            future = self.waiter.submit(work.wait)
            self.sending.append(_Sending(tensor, future.done, future.result))

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Start to receive into `tensor`."""
        work = dist.irecv(tensor, group=self.process_group, group_src=source, tag=self.tag)
        assert work is not None
        return work

    def release(self, *, everything: bool = False) -> None:
        """Let go of what has left; with `everything`, wait until all of it has."""
        while self.sending and (everything or self.sending[0].left()):
            self.sending.popleft().wait()


def _on_nccl(process_group: dist.ProcessGroup) -> bool:
    return str(dist.get_backend(process_group)) == "nccl"


def _open_lanes(
    routes: list[_Route], group: Group, device: torch.device, timeout: timedelta | None
) -> dict[_Route, _Lane]:
    whole = group.process_group
    assert whole is not None
    if not _on_nccl(whole):
        return {route: _Lane(whole, tag) for tag, route in enumerate(routes)}
    lanes = {}
    for route in routes:
        own = dist.new_group(
            list(group.ranks), timeout=timeout, backend=dist.get_backend(whole), use_local_synchronization=True
        )
        lanes[route] = _Lane(own, 0)
        _connect(route, own, group, device)
    return lanes


def _connect(route: _Route, process_group: dist.ProcessGroup, group: Group, device: torch.device) -> None:
    """Let NCCL make the communicator of each pair of neighbours, one after the other. It makes one when both have
    called their first operation, and blocks until then: in a schedule, where a receive is posted before this rank has
    sent what its neighbour waits for, that would be for ever."""
    if process_group.bound_device_id is not None:
        raise ValueError(
            "process groups bound to a device have one communicator, not one a pair: init without device_id"
        )
    token = torch.zeros(1, device=device)
    for source in range(group.size):
        target = route.target(source, group.size)
        if target is not None and group.rank == source:
            dist.send(token, group=process_group, group_dst=target)
        elif target is not None and group.rank == target:
            dist.recv(token, group=process_group, group_src=source)
