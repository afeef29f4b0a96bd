"""Class scores from hidden states: the head of a sequence classifier.

Key idea: every token gets scores, as a language model's tokens get logits, and the loss mask picks the last token of
each text. The head is small, so it is whole on every tensor-parallel rank; with sequence parallelism each rank scores
its part of the tokens, and only the scores are put together.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.collectives import reduce_from_group
from megalite.distributed.param_spec import DECOUPLED, Init, ParamSpec, replicated
from megalite.nn.cross_entropy import OutputLoss
from megalite.nn.linear import linear
from megalite.nn.module import Build, ShardedModule


class ClassifierHead(ShardedModule):
    """Scores of `classes` classes. Its weight is [classes, hidden], without a bias, as Hugging Face's classifiers on
    decoders have it (`score`)."""

    def __init__(self, build: Build, classes: int):
        super().__init__()
        self.wide, self.group = build.precision.wide, build.mesh.tp
        self.sequence_parallel = build.mesh.layout.sequence_parallel
        self.gradients = build.weight_gradients
        shape = (classes, build.config.hidden_size)
        boxes = replicated(shape, build.place(), partial=self.sequence_parallel)
        spec = ParamSpec(shape, shape, boxes, Init(std=build.config.init_method_std), DECOUPLED)
        self.weight = self.add_parameter("weight", spec, build)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] → [s, b, classes], with sequence parallelism of this rank's part of s."""
        return linear(hidden, self.weight, gradients=self.gradients)

    def loss(
        self, hidden: Tensor, targets: Tensor, token_indices: Tensor | None, scale: Tensor | float, smoothing: float
    ) -> OutputLoss:
        """Cross-entropy of every token, or of those in `token_indices`, for `targets` [n]; equal on all ranks. They are
        so few that all tokens are scored."""
        scores = self._all(self(hidden)).flatten(0, 1).to(self.wide)
        if token_indices is not None:
            scores = scores[token_indices]
        losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
        return OutputLoss(losses.detach(), losses.sum() * scale)

    def decisions(self, hidden: Tensor) -> Tensor:
        """The class with the highest score at every token, int64 [s, b], equal on all ranks."""
        return self._all(self(hidden).argmax(dim=-1))

    def _all(self, x: Tensor) -> Tensor:
        """[s, ...] from the ranks' parts: zeros elsewhere, and the sum."""
        if not self.sequence_parallel:
            return x
        before, length = self.group.rank * x.shape[0], x.shape[0] * self.group.size
        x = F.pad(x, (*[0, 0] * (x.ndim - 1), before, length - before - x.shape[0]))
        return reduce_from_group(x, self.group)
