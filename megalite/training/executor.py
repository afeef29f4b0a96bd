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


def sequence_info(batch: Microbatch, device: torch.device, dropout_key: Tensor | None) -> SequenceInfo:
    """What a forward needs to know of a microbatch. `dropout_key`: the run's, None in evaluation."""
    borders = None
    if batch.document_ids is not None and device.type == "cuda":
        borders = cumulative_lengths(batch.document_ids.cpu()).to(device, non_blocking=True)
    moved = batch.to(device)
    index = torch.arange(batch.tokens.shape[1], device=device)
    keys = None if dropout_key is None else random.fold(dropout_key.to(device), moved.sample_ids)
    return SequenceInfo(
        position_ids=moved.position_ids,
        token_index=index,
        document_ids=moved.document_ids,
        document_borders=borders,
        dropout_keys=keys,
    )


class GPTExecutor:
    """Forward and backward of the microbatches of one step."""

    def __init__(self, stage: GPTStage, device: torch.device, *, label_smoothing: float):
        self.stage, self.device, self.label_smoothing = stage, device, label_smoothing
        self._microbatches: list[Microbatch] = []
        self._roots: dict[int, Tensor] = {}
        self._scale = 0.0
        self._dropout_key: Tensor | None = None
        self._training = False
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def begin(
        self,
        microbatches: list[Microbatch],
        *,
        loss_scale: float = 1.0,
        tokens: int = 1,
        dropout_key: Tensor | None = None,
    ) -> None:
        """Set the microbatches of a step. `tokens`: unmasked ones of the global batch. Without a `dropout_key` it is
        an evaluation. `loss_sum` starts from zero."""
        self._microbatches = microbatches
        self._training = dropout_key is not None
        self._dropout_key = dropout_key
        self._scale = loss_scale / max(1, tokens)
        self._roots.clear()
        self.loss_sum.zero_()

    def forward(self, chunk: int, microbatch: int) -> None:
        """Add this microbatch's loss to `loss_sum`; in training keep the graph."""
        batch = self._microbatches[microbatch]
        with torch.set_grad_enabled(self._training):
            info = sequence_info(batch, self.device, self._dropout_key)
            hidden = self.stage(batch.tokens.to(self.device, non_blocking=True), info)
            labels = batch.labels.to(self.device, non_blocking=True)
            smoothing = self.label_smoothing if self._training else 0.0
            losses = self.stage.token_losses(hidden, labels, label_smoothing=smoothing)
            mask = batch.loss_mask.to(self.device, non_blocking=True).t()
            total = losses.where(mask, 0.0).sum()
        self.loss_sum += total.detach()
        if self._training:
            self._roots[microbatch] = total * self._scale

    def backward(self, chunk: int, microbatch: int) -> None:
        """Accumulate the gradients of this microbatch."""
        self._roots.pop(microbatch).backward()
