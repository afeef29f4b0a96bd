"""Computes the actions of a schedule on a rank's chunks of a GPT.

Key idea: a token's loss is scaled by loss scale / tokens of the whole global batch, counted before the first forward;
so gradients land in the main-gradient buffers with their final meaning and are only ever summed. What crosses a stage
boundary leaves without its graph: the graph is kept by its edge, so the activation is freed once it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.config.resolve import virtual_stages
from megalite.config.schema import RunConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed import random
from megalite.distributed.mesh import Mesh
from megalite.models.gpt import GPTStage
from megalite.nn.tokens import Auxiliary, Tokens, cumulative_lengths
from megalite.optimizer.optimizer import Optimizer
from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import Action, build_schedule, forward_only
from megalite.training.objective import TokenLoss


class LoweredSchedules:
    """Lowered schedules of one pipeline rank, made once for each number of microbatches."""

    def __init__(self, config: RunConfig, rank: int):
        """Of a resolved configuration; `rank`: along the pipeline."""
        layout = config.layout
        self.name, self.rank = layout.pipeline_schedule, rank
        self.stages, self.chunks = layout.pipeline_model_parallel_size, virtual_stages(config)
        self.group_size = layout.microbatch_group_size_per_virtual_pipeline_stage
        self._training: dict[int, list[Action]] = {}
        self._evaluation: dict[int, list[Action]] = {}

    def training(self, microbatches: int) -> list[Action]:
        """Forwards and backwards. A UserError where the schedule can't do this number."""
        if microbatches not in self._training:
            self._training[microbatches] = self.training_of_all(microbatches)[self.rank]
        return self._training[microbatches]

    def training_of_all(self, microbatches: int) -> list[list[Action]]:
        """As `training`, of each pipeline rank."""
        schedule = build_schedule(self.name, self.stages, self.chunks, microbatches, group_size=self.group_size)
        return lower(schedule, self.stages, self.chunks)

    def evaluation(self, microbatches: int) -> list[Action]:
        """Forwards alone."""
        if microbatches not in self._evaluation:
            schedule = forward_only(self.stages, self.chunks, microbatches)
            self._evaluation[microbatches] = lower(schedule, self.stages, self.chunks)[self.rank]
        return self._evaluation[microbatches]


Tensors = dict[str, Tensor]
HIDDEN = "hidden"  # activations between stages: [s, b, h], with sequence parallelism this rank's part of s


def move(batch: Microbatch, mesh: Mesh, dropout_key: Tensor | None = None) -> tuple[Microbatch, Tokens]:
    """A microbatch on the mesh's device, and what a forward needs to know of its tokens. `dropout_key`: the run's, on
    that device, None in evaluation."""
    borders = None
    if batch.document_ids is not None and mesh.device.type == "cuda":
        # Their number is data: found on the host, so that nothing waits for the device.
        borders = mesh.upload(cumulative_lengths(batch.document_ids))
    batch = batch.map(mesh.upload)
    tokens = replace(
        Tokens.at(batch.places, batch.position_ids, batch.document_ids),
        group=mesh.tp if mesh.layout.sequence_parallel else None,
        borders=borders,
        lengths=batch.lengths,
        dropout_keys=None if dropout_key is None else random.fold(dropout_key, batch.sample_ids),
    )
    return batch, tokens


@dataclass(frozen=True)
class _Kept:
    """What the backward of one (chunk, microbatch) needs: where its graph begins and ends."""

    edges: list[GradientEdge]  # of what it sends, if anything, then of its losses
    input: Tensor | None  # None where the stage begins with the embedding


class GPTExecutor:
    """Forward and backward of one rank's chunks on the microbatches of one step."""

    def __init__(
        self, stages: Sequence[GPTStage], mesh: Mesh, objective: TokenLoss, *, optimizer: Optimizer | None = None
    ):
        """`optimizer`: is told when a chunk's forwards and backwards begin and end.

        `on_evaluated`, where it is set, gets the last stage's result of each microbatch of an evaluation.
        """
        self.optimizer = optimizer
        self.stages, self.mesh, self.objective = list(stages), mesh, objective
        self._microbatches: list[Microbatch] = []
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._weight_jobs: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._scale: Tensor | float = 1.0
        self._sample_scale: Tensor | float = 1.0
        self._ahead_scales = torch.ones(objective.depths)
        self._dropout_key: Tensor | None = None
        self._training = False
        self.on_evaluated: Callable[[GPTStage, Tensor, Microbatch], None] | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.ahead_sums = torch.zeros(objective.depths, dtype=torch.float64, device=mesh.device)

    def begin(
        self,
        microbatches: list[Microbatch],
        *,
        scale: Tensor | float = 1.0,
        sample_scale: Tensor | float = 1.0,
        ahead_scales: Tensor | None = None,
        dropout_key: Tensor | None = None,
    ) -> None:
        """Set the microbatches of a step. `scale` multiplies the summed loss before its backward, `sample_scale` an
        auxiliary loss of a mean sequence, `ahead_scales` [depths] those of multi-token prediction. Without a
        `dropout_key` it is an evaluation. `loss_sum` and `ahead_sums`, which only ranks of the last stage add to, start
        from zero."""
        self._microbatches = microbatches
        self._training = dropout_key is not None
        self._dropout_key = None if dropout_key is None else self.mesh.upload(dropout_key)
        self._scale, self._sample_scale = scale, sample_scale
        self._ahead_scales = torch.ones(self.objective.depths) if ahead_scales is None else ahead_scales
        self._kept.clear()
        self.loss_sum.zero_()
        self.ahead_sums.zero_()

    def expected_inputs(self, chunk: int, microbatch: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what a chunk's forward gets from the previous stage."""
        batch, tokens = self._microbatches[microbatch].tokens.shape
        length = self.stages[chunk].sequence_length(tokens) // self.mesh.layout.sequence_parts
        hidden = self.stages[chunk].config.hidden_size
        return {HIDDEN: ((length, batch, hidden), self.stages[chunk].compute)}

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None = None) -> Tensors | None:
        """Run a chunk. The last stage adds its loss to `loss_sum`; others return what the next one needs."""
        stage, host = self.stages[chunk], self._microbatches[microbatch]
        if self.optimizer is not None:
            self.optimizer.forward_begins()
        batch, tokens = move(host, self.mesh, self._dropout_key)
        auxiliary = Auxiliary(self._sample_scale) if self._training else None
        tokens = replace(tokens, auxiliary=auxiliary)
        received = None
        if not stage.span.has_embedding:
            assert inputs is not None
            received = inputs[HIDDEN].detach().requires_grad_(self._training)
        with torch.set_grad_enabled(self._training):
            hidden = stage(batch.tokens if received is None else received, tokens)
            losses = self._losses(stage, hidden, host, batch, tokens)
            if auxiliary is not None:
                auxiliary.counting = False  # what is computed again counts once
            sent = [] if stage.span.has_output else [hidden]
            if self._training:
                ends = [get_gradient_edge(end) for end in (*sent, *losses)]
                self._kept[chunk, microbatch] = _Kept(ends, received)
        return {HIDDEN: hidden.detach()} if sent else None

    def _losses(
        self, stage: GPTStage, hidden: Tensor, host: Microbatch, batch: Microbatch, tokens: Tokens
    ) -> list[Tensor]:
        """Where the backward of what a stage adds to the loss of a microbatch begins, which is on the host and on the
        device. Adds to the sums."""
        if not stage.span.has_output:
            return []
        if self.on_evaluated is not None and not self._training:
            self.on_evaluated(stage, hidden, batch)
        states: list[Tensor] = []
        if self._training and batch.ahead_tokens is not None:
            states = stage.states_ahead(hidden, batch.ahead_tokens, tokens)
        loss, total = self._loss(stage, hidden, batch.labels, host.loss_mask, self._scale)
        self.loss_sum += loss
        totals = [total]
        for depth, state in enumerate(states):
            assert batch.ahead_labels is not None and host.ahead_mask is not None
            labels, mask = batch.ahead_labels[:, depth], host.ahead_mask[:, depth]
            loss, total = self._loss(stage, state, labels, mask, self._ahead_scales[depth])
            self.ahead_sums[depth] += loss
            totals.append(total)
        return totals

    def _loss(
        self, stage: GPTStage, hidden: Tensor, labels: Tensor, mask: Tensor, scale: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """As `TokenLoss.loss`. `mask`: which labels count, on the host."""
        indices = self.objective.token_indices(mask)
        indices = None if indices is None else self.mesh.upload(indices)
        return self.objective.loss(stage, hidden, labels, indices, scale=scale, training=self._training)

    def backward(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        """Accumulate the gradients of a chunk's parameters; return those of its inputs."""
        grads = self._backward(chunk, microbatch, output_grads)
        self._backward_ended(chunk)
        return grads

    def _backward_ended(self, chunk: int) -> None:
        if self.optimizer is not None:
            self.optimizer.backward_ended(chunk)

    def _backward(self, chunk: int, microbatch: int, output_grads: Tensors | None) -> Tensors | None:
        if self.optimizer is not None:
            self.optimizer.backward_begins()
        kept = self._kept.pop((chunk, microbatch))
        grads = [] if output_grads is None else [output_grads[HIDDEN]]
        torch.autograd.backward(kept.edges, [*grads, *[None] * (len(kept.edges) - len(grads))])
        if kept.input is None:
            return None
        assert kept.input.grad is not None
        return {HIDDEN: kept.input.grad}

    def backward_input(self, chunk: int, microbatch: int, output_grads: Tensors | None = None) -> Tensors | None:
        """As `backward`, but the weight gradients of linear layers wait for `backward_weight`."""
        gradients = self.stages[chunk].weight_gradients
        gradients.deferred = True
        try:
            return self._backward(chunk, microbatch, output_grads)
        finally:
            gradients.deferred = False
            self._weight_jobs[chunk, microbatch] = gradients.take()

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """The rest of `backward_input`."""
        for job in self._weight_jobs.pop((chunk, microbatch)):
            job()
        self._backward_ended(chunk)
