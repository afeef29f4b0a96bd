"""Forwards and backwards of a batch over the pipeline, for a step of training or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from megalite.data.microbatch import Microbatch
from megalite.models.gpt import GPTStage
from megalite.pipeline.runtime import PipelineRuntime, Recorder
from megalite.pipeline.transport import ProcessGroupTransport
from megalite.training.executor import GPTExecutor, LoweredSchedules
from megalite.training.model import TrainedModel
from megalite.training.objective import TokenLoss

OnOutput = Callable[[GPTStage, Tensor, Microbatch], None]
"""Gets the last stage's hidden states [s, b, h] of a microbatch, on the ranks of that stage."""


class Engine:
    """`objective`: what the loss is. `recorders`: are told of every action of training."""

    def __init__(self, model: TrainedModel, objective: TokenLoss, recorders: Sequence[Recorder] = ()):
        config, mesh = model.config, model.mesh
        self.executor = GPTExecutor(model.stages, mesh, objective, optimizer=model.optimizer)
        self.schedules = LoweredSchedules(config, mesh.pp.rank)
        transport = None
        if mesh.pp.size > 1:
            timeout = timedelta(minutes=config.layout.distributed_timeout_minutes)
            transport = ProcessGroupTransport(mesh.pp, len(model.stages), mesh.device, timeout=timeout)
        # This stream alone: another may hold a receive that was posted early and ends only after later actions.
        wait = torch.cuda.current_stream().synchronize if mesh.device.type == "cuda" else None
        self._training = PipelineRuntime(self.executor, recorders, wait, transport)
        self._evaluation = PipelineRuntime(self.executor, (), wait, transport)

    def train(
        self,
        microbatches: list[Microbatch],
        *,
        scale: Tensor,
        sample_scale: float,
        ahead_scales: Tensor,
        dropout_key: Tensor,
    ) -> Tensor:
        """Gradients of the summed losses times `scale`, of auxiliary ones, and of those of multi-token prediction times
        `ahead_scales` [depths], into the buffers; the summed losses and these, float64 [1 + depths], on the device:
        zeros on ranks of other stages than the last."""
        self.executor.begin(
            microbatches, scale=scale, sample_scale=sample_scale, ahead_scales=ahead_scales, dropout_key=dropout_key
        )
        self._training.run(self.schedules.training(len(microbatches)))
        return torch.cat((self.executor.loss_sum.view(1), self.executor.ahead_sums))

    def evaluate(self, microbatches: list[Microbatch], on_output: OnOutput | None = None) -> Tensor:
        """The summed losses of next tokens, or labels, of forwards alone: float64 [], as above."""
        self.executor.on_evaluated = on_output
        self.executor.begin(microbatches)
        self._evaluation.run(self.schedules.evaluation(len(microbatches)))
        return self.executor.loss_sum
