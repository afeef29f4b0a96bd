"""How well a classifier decides: accuracy and macro F1 over an evaluation.

Key idea: all there is to know are the counts of (true class, decided class); they add up over microbatches and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.data.microbatch import Microbatch
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.models.gpt import GPTStage


class DecisionCounts:
    """Counts int64 [true class, decided class], on ranks of the last pipeline stage."""

    def __init__(self, classes: int, mesh: Mesh):
        self.mesh = mesh
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=mesh.device)

    def clear(self) -> None:
        """Begin an evaluation."""
        self.counts.zero_()

    def add(self, stage: GPTStage, hidden: Tensor, batch: Microbatch) -> None:
        """Count the decisions of the last stage from its `hidden` [s, b, h] at the places that count."""
        decided = stage.decisions(hidden).t()[batch.loss_mask]
        true = batch.labels[batch.loss_mask]
        places = true * len(self.counts) + decided
        self.counts += torch.bincount(places, minlength=self.counts.numel()).view_as(self.counts)

    def scores(self) -> dict[str, float]:
        """Accuracy and macro F1 of all that was counted. Collective over the ranks that differ in data or stage."""
        return scores_of(all_reduce(self.counts.clone(), self.mesh.all_but_tp))


def scores_of(counts: Tensor) -> dict[str, float]:
    """`accuracy`, and `macro_f1`: the mean over the classes that occur (truly or as a decision) of
    2 hits / (truly + decided). `counts` [true, decided]; zeros where nothing was counted."""
    table = counts.double().cpu()
    hits, occurrences = table.diag(), table.sum(0) + table.sum(1)
    seen = occurrences > 0
    f1 = (2 * hits[seen] / occurrences[seen]).mean() if seen.any() else torch.zeros(())
    return {"accuracy": float(hits.sum() / table.sum().clamp(min=1)), "macro_f1": float(f1)}
