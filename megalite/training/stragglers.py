"""Which rank makes the others wait: how long each computes in a step.

Key idea: all ranks' steps take equally long, since they wait for each other; what tells them apart is the time that
their forwards and backwards take, without the waits for other stages and for the reduction of gradients. Ranks that
share a layer's matrices or a sequence wait for each other within a forward, so they look alike.
"""

from __future__ import annotations

import socket
from statistics import median
from typing import NamedTuple

from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.mesh import Mesh
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action

_COMPUTES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class _Computed(NamedTuple):
    rank: int
    stage: int
    host: str
    milliseconds: float


class ComputeTime:
    """A recorder of the pipeline's runtime: milliseconds that this rank has computed since the last report."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.total = mesh, 0.0

    def __call__(self, action: Action, begin: float, end: float) -> None:
        if action.kind in _COMPUTES:
            self.total += end - begin

    def report(self, steps: int, step_ms: float, count: int) -> str:
        """A line on the mean of the last `steps`, each of which took `step_ms`: the `count` ranks that computed longest
        and shortest. Starts over. Collective over the world."""
        mine = _Computed(self.mesh.rank, self.mesh.pp.rank, socket.gethostname(), self.total / steps)
        self.total = 0.0
        return straggler_line(all_gather_objects(mine, self.mesh.world), step_ms, count)


def straggler_line(ranks: list[_Computed], step_ms: float, count: int) -> str:
    """`ranks`: all of them. A rank of a pipeline is compared with those of its stage, which have the same work."""
    order = sorted(ranks, key=lambda each: -each.milliseconds)

    def told(each: _Computed) -> str:
        usual = median(other.milliseconds for other in ranks if other.stage == each.stage)
        share = f"{each.milliseconds:.1f} ms = {each.milliseconds / step_ms:.0%} of the step"
        return f"rank {each.rank} on {each.host}: {share}, {each.milliseconds / usual:.2f} x its stage's median"

    slowest = "; ".join(told(each) for each in order[:count])
    fastest = "; ".join(told(each) for each in order[::-1][:count])
    return f" computing | slowest {slowest} | fastest {fastest} |"
