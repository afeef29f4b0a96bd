"""Sums over the copies of a parameter inside one replica.

Key idea: where copies hold partial gradients (sequence-parallel norms, key/value heads that several ranks share, tied
embeddings on two stages) their sum comes before the data-parallel reduction. Which boxes, and over which ranks, is what
each `Box.sum_over` says; boxes with equal ranks travel together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.distributed.collectives import sum_over_ranks
from megalite.distributed.mesh import Mesh
from megalite.optimizer.buffers import FlatBuffer


class CopySums:
    """The partial copies of all buffers, as views of their gradients, by the ranks that share them."""

    def __init__(self, buffers: Iterable[FlatBuffer], mesh: Mesh):
        self.mesh = mesh
        found: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for buffer in buffers:
            for slot in buffer.slots:
                view = slot.view(buffer.grads)
                for box in slot.spec.boxes:
                    if box.sum_over:
                        found.setdefault(box.sum_over, []).append((slot.name, view[box.local_slices]))
        # In one order on all ranks: groups by their ranks, boxes by the parameter's global name.
        self.groups = {
            ranks: [view for _, view in sorted(found[ranks], key=lambda named: named[0])] for ranks in sorted(found)
        }

    def reduce(self) -> None:
        """Sum them. Collective over one replica."""
        for ranks, views in self.groups.items():
            if len(views) == 1 and views[0].is_contiguous():
                sum_over_ranks(views[0], ranks, self.mesh)
                continue
            flat = sum_over_ranks(torch.cat([view.reshape(-1) for view in views]), ranks, self.mesh)
            for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
