"""A chain of tiny layers cut into pipeline stages, for tests of the runtime. Runs in the workers of the pool."""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.distributed.mesh import Mesh
from megalite.pipeline import transport
from megalite.pipeline.lowering import lower
from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import build_schedule, forward_only
from megalite.pipeline.transport import ProcessGroupTransport, Shapes, Tensors

WIDTH = 5
Grads = dict[int, list[Tensor]]  # of weight and bias, by global stage


def layer(stage: int) -> nn.Linear:
    """The layer of a global stage, the same in every layout."""
    torch.manual_seed(stage)
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def microbatches(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """One input [size, WIDTH] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for size in sizes]


def stage_forward(linear: nn.Linear, hidden: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """What a stage computes: `hidden` [size, WIDTH] and a running `mean` [WIDTH], both with gradients."""
    hidden = torch.tanh(linear(hidden) + mean)
    return hidden, mean + hidden.mean(0)


def loss_of(hidden: Tensor, mean: Tensor) -> Tensor:
    return (hidden**2).sum() + mean.sin().sum()


def one_process(stages: int, sizes: Sequence[int]) -> tuple[Grads, list[float]]:
    """The truth: plain autograd through the whole chain, one microbatch after the other. Gradients and losses."""
    layers = [layer(stage) for stage in range(stages)]
    losses = []
    for hidden in microbatches(sizes):
        mean = torch.zeros(WIDTH, dtype=torch.float64)
        for linear in layers:
            hidden, mean = stage_forward(linear, hidden, mean)
        loss = loss_of(hidden, mean)
        loss.backward()
        losses.append(loss.item())
    grads = {s: [p.grad for p in linear.parameters() if p.grad is not None] for s, linear in enumerate(layers)}
    return grads, losses


@dataclass
class Kept:
    """What a backward needs of its forward."""

    inputs: list[Tensor]
    edges: list[GradientEdge]
    grads: list[Tensor] = field(default_factory=list)  # of the outputs, from backward_input to backward_weight


class ToyExecutor:
    """The chunks of a rank. Besides `hidden` and `mean` an integer tensor travels, which has no gradient."""

    def __init__(self, rank: int, stages: int, chunks: int):
        self.rank, self.stages, self.total = rank, stages, stages * chunks
        self.layers = [layer(chunk * stages + rank) for chunk in range(chunks)]
        self.sums: list[list[Tensor]] = [[] for _ in self.layers]
        self.data: list[Tensor] = []
        self.losses: list[float] = []
        self.kept: dict[tuple[int, int], Kept] = {}
        self.peak_kept = 0
        self.training = True

    def begin(self, data: list[Tensor], *, training: bool) -> None:
        self.data, self.training = data, training
        self.losses, self.sums = [], [[] for _ in self.layers]
        self.peak_kept = 0

    def expected_inputs(self, chunk: int, microbatch: int) -> Shapes:
        size = len(self.data[microbatch])
        return {
            "mean": ((WIDTH,), torch.float64),
            "hidden": ((size, WIDTH), torch.float64),
            "visits": ((size,), torch.int64),
        }

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None = None) -> Tensors | None:
        stage = chunk * self.stages + self.rank
        if inputs is None:
            assert stage == 0
            hidden, mean = self.data[microbatch], torch.zeros(WIDTH, dtype=torch.float64)
            visits = torch.arange(len(hidden))
        else:
            hidden, mean = (inputs[name].requires_grad_(self.training) for name in ("hidden", "mean"))
            visits = inputs["visits"]
            assert torch.equal(visits, torch.arange(len(hidden)) + stage)
        with torch.set_grad_enabled(self.training):
            outputs = stage_forward(self.layers[chunk], hidden, mean)
            last = stage == self.total - 1
            results = [loss_of(*outputs)] if last else list(outputs)
        if last:
            self.losses.append(results[0].item())
        if self.training:
            edges = [get_gradient_edge(result) for result in results]
            self.kept[chunk, microbatch] = Kept([] if inputs is None else [hidden, mean], edges)
            self.peak_kept = max(self.peak_kept, len(self.kept))
        return None if last else {"hidden": outputs[0], "mean": outputs[1], "visits": visits + 1}

    def _grad(self, kept: Kept, targets: list[Tensor]) -> list[Tensor]:
        # The whole graph stays until `kept` goes, since a split backward goes through it twice.
        return list(torch.autograd.grad(kept.edges, targets, kept.grads, retain_graph=True)) if targets else []

    def backward_input(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        kept = self.kept[chunk, microbatch]
        if output_grads is None:
            kept.grads = [torch.ones((), dtype=torch.float64)]
        else:
            assert set(output_grads) == {"hidden", "mean"}
            kept.grads = [output_grads["hidden"], output_grads["mean"]]
        grads = self._grad(kept, kept.inputs)
        return dict(zip(("hidden", "mean"), grads, strict=True)) if grads else None

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        grads = self._grad(self.kept.pop((chunk, microbatch)), list(self.layers[chunk].parameters()))
        sums = self.sums[chunk]
        self.sums[chunk] = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads

    def backward(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        grads = self.backward_input(chunk, microbatch, output_grads)
        self.backward_weight(chunk, microbatch)
        return grads


@dataclass
class Outcome:
    """What a rank found in its last training step."""

    grads: Grads
    losses: list[float]
    peak_live: int
    peak_kept: int  # as the executor counts
    evaluations: list[list[float]]
    left_over: int  # activations still kept at the end


def train_on_groups(mesh: Mesh, name: str, chunks: int, sizes: Sequence[int], steps: int) -> Outcome:
    """As `train`, with process groups for lanes instead of tags, as on NCCL."""
    with unittest.mock.patch.object(transport, "_on_nccl", return_value=True):
        return train(mesh, name, chunks, sizes, steps, None, 0)


def train(
    mesh: Mesh, name: str, chunks: int, sizes: Sequence[int], steps: int, group_size: int | None, evaluate: int
) -> Outcome:
    """Run the same training step `steps` times; before every `evaluate`-th an evaluation of the same microbatches."""
    rank, stages = mesh.pp.rank, mesh.pp.size
    executor = ToyExecutor(rank, stages, chunks)
    carrier = ProcessGroupTransport(mesh.pp, chunks, mesh.device) if stages * chunks > 1 else None
    runtime = PipelineRuntime(executor, transport=carrier)
    training = lower(build_schedule(name, stages, chunks, len(sizes), group_size=group_size), stages, chunks)[rank]
    evaluation = lower(forward_only(stages, chunks, len(sizes)), stages, chunks)[rank]
    evaluations = []
    for step in range(steps):
        if evaluate and step % evaluate == 0:
            executor.begin(microbatches(sizes), training=False)
            runtime.run(evaluation)
            assert runtime.peak_live == 0
            evaluations.append(executor.losses)
        executor.begin(microbatches(sizes), training=True)
        runtime.run(training)
    grads = {chunk * stages + rank: sums for chunk, sums in enumerate(executor.sums)}
    return Outcome(grads, executor.losses, runtime.peak_live, executor.peak_kept, evaluations, len(executor.kept))
