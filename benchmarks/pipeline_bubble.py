"""Measured against simulated makespan of each pipeline schedule, with sleeps in place of computing.

What a sleep leaves out (the processor) is what the simulator leaves out too, so a difference is the runtime's own:
its communication, and where it waits though it needn't.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megalite.distributed.collectives import all_gather_objects, barrier
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.pipeline.lowering import lower
from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, build_schedule
from megalite.pipeline.simulator import simulate, stage_costs
from megalite.pipeline.timeline import Costs, Span, Timeline
from megalite.pipeline.transport import ProcessGroupTransport, Shapes, Tensors

SHAPES: Shapes = {"hidden": ((64, 64), torch.float32)}


class Sleeper:
    """An executor whose actions take the simulator's costs, in milliseconds."""

    def __init__(self, rank: int, stages: int, chunks: int, costs: Costs):
        self.rank, self.stages, self.chunks, self.costs = rank, stages, chunks, costs

    def expected_inputs(self, chunk: int, microbatch: int) -> Shapes:
        return SHAPES

    def _sleep(self, kind: str, chunk: int, microbatch: int, end: tuple[int, int]) -> Tensors | None:
        """Sleep; give tensors to the neighbour except at that end of the model."""
        time.sleep(self.costs(self.rank, Action(kind, chunk, microbatch)) / 1e3)
        return None if (self.rank, chunk) == end else {name: torch.zeros(shape) for name, (shape, _) in SHAPES.items()}

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None = None) -> Tensors | None:
        return self._sleep(FORWARD, chunk, microbatch, (self.stages - 1, self.chunks - 1))

    def backward(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        return self._sleep(BACKWARD, chunk, microbatch, (0, 0))

    def backward_input(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        return self._sleep(BACKWARD_INPUT, chunk, microbatch, (0, 0))

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        self._sleep(BACKWARD_WEIGHT, chunk, microbatch, (0, 0))


def measure(mesh: Mesh, name: str, chunks: int, microbatches: int, milliseconds: float, repeats: int) -> list[Timeline]:
    """What all ranks did, `repeats` times after one for warm-up."""
    rank, stages = mesh.pp.rank, mesh.pp.size
    sleeper = Sleeper(rank, stages, chunks, costs_of(chunks, milliseconds))
    spans: list[Span] = []
    runtime = PipelineRuntime(
        sleeper,
        recorder=lambda action, begin, end: spans.append(Span(action, begin, end)),
        transport=ProcessGroupTransport(mesh.pp, chunks, mesh.device),
    )
    actions = lower(build_schedule(name, stages, chunks, microbatches), stages, chunks)[rank]
    timelines = []
    for _ in range(repeats + 1):
        spans.clear()
        barrier(mesh.pp)
        runtime.run(actions)
        timelines.append(Timeline(all_gather_objects(list(spans), mesh.pp)))
    return timelines[1:]


def costs_of(chunks: int, milliseconds: float) -> Costs:
    """F = B = W of a whole rank."""
    return stage_costs(chunks, forward=milliseconds, backward_input=milliseconds, backward_weight=milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="F, B and W of a rank, each (default: 50)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"p = {args.stages}, m = {args.microbatches}, F = B = W = {args.milliseconds:g} ms; {args.repeats} repeats")
    print(
        f"{'schedule':16} {'simulated':>10} {'measured':>10} {'min':>8} {'max':>8} {'ratio':>7} {'bubbles':>13}  live"
    )
    with ProcessPool(args.stages) as pool:
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)):
            schedule = lower(build_schedule(name, args.stages, chunks, args.microbatches), args.stages, chunks)
            planned = simulate(schedule, costs_of(chunks, args.milliseconds))
            arguments = (name, chunks, args.microbatches, args.milliseconds, args.repeats)
            done = pool.run(measure, args.stages, *arguments, layout=Layout(pp=args.stages))[0]
            times = [timeline.makespan for timeline in done]
            middle = statistics.median(times)
            bubbles = f"{planned.bubble_share:.1%} {statistics.median(t.bubble_share for t in done):.1%}"
            label = f"{name} v={chunks}" if chunks > 1 else name
            print(
                f"{label:16} {planned.makespan:10.1f} {middle:10.1f} {min(times):8.1f} {max(times):8.1f} "
                f"{middle / planned.makespan:7.3f} {bubbles:>13}  {done[0].peak_live()}"
            )


if __name__ == "__main__":
    main()
