"""Tensors arrive where and as they were sent, and are let go once they have left."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pool import ProcessPool
from megalite.pipeline import transport
from megalite.pipeline.lowering import (
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WAIT_BACKWARD,
    WAIT_FORWARD,
)
from megalite.pipeline.schedules import Action
from megalite.pipeline.transport import ProcessGroupTransport
from tests.helpers import PRELOADED
from tests.pipeline import toy

SHAPES = {"hidden": ((2, 3), torch.float32), "ids": ((2,), torch.int64)}


def exchange(mesh: Mesh) -> list[tuple[int, int]]:
    """Every message of two ranks with two chunks at once; all receives are posted before anything is sent.
    Returns (value expected, value received)."""
    carrier = ProcessGroupTransport(mesh.pp, 2, mesh.device)
    forward = [Action(RECV_FORWARD, chunk, m) for m in range(3) for chunk in range(2) if chunk + mesh.pp.rank > 0]
    backward = [Action(RECV_BACKWARD, chunk, m) for m in range(3) for chunk in range(2) if chunk + mesh.pp.rank < 2]
    for action in backward + forward:
        carrier.post(action, SHAPES)
    for m in range(3):
        for chunk in range(2):
            for kind, sign in ((SEND_FORWARD, 1), (SEND_BACKWARD, -1)):
                stage = 2 * chunk + mesh.pp.rank
                if 0 <= stage + sign < 4:
                    value = 100 * sign * (stage + 1) + m
                    tensors = {"ids": torch.full((2,), value), "hidden": torch.full((3, 2), float(value)).t()}
                    carrier.send(Action(kind, chunk, m), tensors)
    found = []
    for kind, sign, actions in ((WAIT_BACKWARD, -1, backward), (WAIT_FORWARD, 1, forward)):
        for action in actions:
            stage = 2 * action.chunk + mesh.pp.rank - sign
            got = carrier.wait(action._replace(kind=kind))
            values = {int(value) for tensor in got.values() for value in tensor.flatten()}
            assert len(values) == 1
            found.append((100 * sign * (stage + 1) + action.microbatch, values.pop()))
    carrier.finish()
    return found


def test_two_ranks_with_two_chunks_never_mix_up_directions_or_chunks(pool: ProcessPool) -> None:
    for found in pool.run(exchange, 2, layout=Layout(pp=2)):
        assert len(found) == 9
        assert all(expected == received for expected, received in found)


def let_go(mesh: Mesh) -> bool:
    """Whether a tensor that has been received is let go by its sender, who goes on with other things."""
    carrier = ProcessGroupTransport(mesh.pp, 1, mesh.device)
    shapes = {"x": ((1000,), torch.float32)}
    if mesh.pp.rank == 1:
        carrier.post(Action(RECV_FORWARD, 0, 0), shapes)
        carrier.send(Action(SEND_BACKWARD, 0, 0), carrier.wait(Action(WAIT_FORWARD, 0, 0)))
        carrier.finish()
        return True
    big = torch.ones(1000)
    alive = weakref.ref(big)
    carrier.post(Action(RECV_BACKWARD, 0, 0), shapes)
    carrier.send(Action(SEND_FORWARD, 0, 0), {"x": big})
    del big
    carrier.wait(Action(WAIT_BACKWARD, 0, 0))
    for _ in range(1000):
        carrier.release()
        gc.collect()
        if alive() is None:
            return True
        time.sleep(0.01)
    return False


def test_a_tensor_is_let_go_once_it_has_left(pool: ProcessPool) -> None:
    assert pool.run(let_go, 2, layout=Layout(pp=2)) == [True, True]


def test_lanes_may_be_process_groups_as_on_nccl() -> None:
    """All workers take part in every layout: torch names a group by how many this process has made."""
    with ProcessPool(4, preload=PRELOADED) as own:
        for layout in (Layout(pp=2, dp=2), Layout(pp=4)):
            sizes = [1, 2, 3, 4]
            outcomes = own.run(toy.train_on_groups, 4, "interleaved", 2, sizes, 3, layout=layout)
            truth, losses = toy.one_process(2 * layout.pp, sizes)
            for outcome in outcomes:
                for stage, grads in outcome.grads.items():
                    assert all(map(torch.equal, grads, truth[stage]))
            assert outcomes[-1].losses == losses


class _QueuedDevice:
    """Stands in for a device with its queue: nothing that the host queues is done before the host waits for it."""

    def __init__(self) -> None:
        self.queued = self.done = 0

    def isend(self, tensor: torch.Tensor, **_: object) -> _QueuedDevice._Work:
        self.queued += 1
        return self._Work(self, self.queued)

    def mark(self) -> Callable[[], None]:
        return partial(self.reach, self.queued)

    def reach(self, number: int) -> None:
        self.done = max(self.done, number)

    class _Work:
        def __init__(self, device: _QueuedDevice, number: int):
            self.device, self.number = device, number

        def is_completed(self) -> bool:
            return self.device.done >= self.number

        def wait(self) -> None:
            self.device.reach(self.number)


def test_a_host_that_runs_ahead_of_its_device_keeps_few_of_the_tensors_that_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = _QueuedDevice()
    monkeypatch.setattr(transport, "_on_nccl", lambda group: True)
    monkeypatch.setattr(transport.dist, "isend", device.isend)
    monkeypatch.setattr(transport, "_mark_stream", device.mark)
    lanes = {transport._Route(onward, False): transport._Lane(None, 0) for onward in (True, False)}  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "_open_lanes", lambda *_: lanes)
    carrier = ProcessGroupTransport(Group((0, 1), 0, object()), 1, torch.device("cuda"))  # type: ignore[arg-type]
    for number in range(20):
        carrier.send(Action(SEND_FORWARD, 0, number), {"hidden": torch.zeros(2)})
        assert sum(len(lane.sending) for lane in lanes.values()) <= transport.MOST_AHEAD
    assert device.done == 20 - transport.MOST_AHEAD  # it waits for no more than that
