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
    """The mean cross-entropy of the tokens that count, in nats: of next tokens or labels.

    In training also that of tokens further ahead (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): the mean of each of
    `depths`, with the weight `ahead_weight` / depths.
    """

    def __init__(self, label_smoothing: float = 0.0, depths: int = 0, ahead_weight: float = 0.0):
        """`label_smoothing`: of training alone."""
        self.label_smoothing, self.depths, self.ahead_weight = label_smoothing, depths, ahead_weight

    def normaliser(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """What these microbatches, on the host, add to the number that the summed loss is divided by: int64 []."""
        return torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()

    def normalisers_ahead(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """As `normaliser`, of the depths: int64 [depths]."""
        masks = [batch.ahead_mask for batch in microbatches if batch.ahead_mask is not None]
        counts = [mask.sum(dim=(0, 2)) for mask in masks]
        return torch.stack(counts).sum(0) if counts else torch.zeros(self.depths, dtype=torch.int64)

    def scales_ahead(self, normalisers: Tensor) -> Tensor:
        """What the summed losses of the depths count for in all, float64 [depths]. `normalisers`: of all ranks."""
        return self.ahead_weight / max(1, self.depths) / normalisers.clamp(min=1).to(torch.float64)

    def token_indices(self, loss_mask: Tensor) -> Tensor | None:
        """Which of the s · b tokens of a microbatch on the host count, int64 [n]; None: all. The output layer computes
        no others. On the host nothing waits for the device. `loss_mask`: bool [b, s]."""
        counted = loss_mask.t().flatten()
        return None if counted.all() else counted.nonzero().flatten()

    def loss(
        self,
        stage: GPTStage,
        hidden: Tensor,
        labels: Tensor,
        token_indices: Tensor | None,
        *,
        scale: Tensor | float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """What a microbatch adds to the summed loss, wide [], and that times `scale`, where its backward begins; from
        the last stage's `hidden` [s, b, h]. `labels` [b, s] and `token_indices` are on its device."""
        smoothing = self.label_smoothing if training else 0.0
        loss = stage.loss(hidden, labels, scale=scale, label_smoothing=smoothing, token_indices=token_indices)
        return loss.tokens.sum(), loss.total
