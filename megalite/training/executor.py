"""Computes the actions of a schedule on a GPT stage.

Key idea: a token's loss is scaled by loss scale / tokens of the whole global batch, counted before the first forward;
so gradients land in the main-gradient buffers with their final meaning and are only ever summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.data.microbatch import Microbatch
from megalite.distributed import random
from megalite.models.gpt import GPTStage
from megalite.nn.attention import cumulative_lengths
from megalite.nn.module import SequenceInfo


def move(batch: Microbatch, device: torch.device, dropout_key: Tensor | None = None) -> tuple[Microbatch, SequenceInfo]:
    """A microbatch on the device, and what a forward needs to know of it. `dropout_key`: the run's, None in
    evaluation."""
    borders = None
    if batch.document_ids is not None and device.type == "cuda":
        # Their number is data: found on the host, so that nothing waits for the device.
        borders = cumulative_lengths(batch.document_ids).to(device, non_blocking=True)
    batch = batch.to(device)
    info = SequenceInfo(
        position_ids=batch.position_ids,
        token_index=torch.arange(batch.tokens.shape[1], device=device),
        document_ids=batch.document_ids,
        document_borders=borders,
        dropout_keys=None if dropout_key is None else random.fold(dropout_key.to(device), batch.sample_ids),
    )
    return batch, info


class GPTExecutor:
    """Forward and backward of the microbatches of one step."""

    def __init__(self, stage: GPTStage, device: torch.device, *, label_smoothing: float):
        self.stage, self.device, self.label_smoothing = stage, device, label_smoothing
        self._microbatches: list[Microbatch] = []
        self._roots: dict[int, Tensor] = {}
        self._scale: Tensor | float = 1.0
        self._dropout_key: Tensor | None = None
        self._training = False
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def begin(
        self, microbatches: list[Microbatch], *, scale: Tensor | float = 1.0, dropout_key: Tensor | None = None
    ) -> None:
        """Set the microbatches of a step. `scale` multiplies the summed loss before its backward. Without a
        `dropout_key` it is an evaluation. `loss_sum` starts from zero."""
        self._microbatches = microbatches
        self._training = dropout_key is not None
        self._dropout_key = dropout_key
        self._scale = scale
        self._roots.clear()
        self.loss_sum.zero_()

    def forward(self, chunk: int, microbatch: int) -> None:
        """Add this microbatch's loss to `loss_sum`; in training keep the graph."""
        batch, info = move(self._microbatches[microbatch], self.device, self._dropout_key)
        with torch.set_grad_enabled(self._training):
            hidden = self.stage(batch.tokens, info)
            smoothing = self.label_smoothing if self._training else 0.0
            losses = self.stage.token_losses(hidden, batch.labels, label_smoothing=smoothing)
            total = losses.where(batch.loss_mask.t(), 0.0).sum()
        self.loss_sum += total.detach()
        if self._training:
            self._roots[microbatch] = total * self._scale

    def backward(self, chunk: int, microbatch: int) -> None:
        """Accumulate the gradients of this microbatch."""
        self._roots.pop(microbatch).backward()
