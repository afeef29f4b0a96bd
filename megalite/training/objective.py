"""What a run minimises.

Key idea: the loss of a step is one sum over the global batch, divided by one number that is known before the first
forward. So an objective says two things of the microbatches that a rank holds: what they add to the sum, and what they
add to the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.data.microbatch import Microbatch
from megalite.models.gpt import GPTStage


class TokenLoss:
    """The mean cross-entropy of the tokens that count, in nats: of next tokens or labels."""

    def __init__(self, label_smoothing: float = 0.0):
        """`label_smoothing`: of training alone."""
        self.label_smoothing = label_smoothing

    def normaliser(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """What these microbatches, on the host, add to the number that the summed loss is divided by: int64 []."""
        return torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()

    def token_indices(self, batch: Microbatch) -> Tensor | None:
        """Which of the s · b tokens of a microbatch on the host count, int64 [n]; None: all. The output layer computes
        no others. On the host nothing waits for the device."""
        counted = batch.loss_mask.t().flatten()
        return None if counted.all() else counted.nonzero().flatten()

    def loss(
        self,
        stage: GPTStage,
        hidden: Tensor,
        batch: Microbatch,
        token_indices: Tensor | None,
        *,
        scale: Tensor | float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """What a microbatch adds to the summed loss, wide [], and that times `scale`, where its backward begins; from
        the last stage's `hidden` [s, b, h]. `batch` and `token_indices` are on its device."""
        smoothing = self.label_smoothing if training else 0.0
        loss = stage.loss(hidden, batch.labels, scale=scale, label_smoothing=smoothing, token_indices=token_indices)
        return loss.tokens.sum(), loss.total
