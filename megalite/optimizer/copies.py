"""Sums over the copies of a parameter inside one replica of its domain.

Key idea: where copies hold partial gradients (sequence-parallel norms, key/value heads that several ranks share, tied
embeddings on two stages), they are summed after the data-parallel reduction, so that only a rank's shard travels. That
is right because ranks that share a box hold the same shard of it, which is checked when the optimizer is built. Which
boxes, and over which ranks, is what each `Box.sum_over` says; boxes with equal ranks travel together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects, sum_over_ranks
from megalite.distributed.layout import Domain
from megalite.distributed.mesh import Mesh
from megalite.optimizer.buckets import Bucket

Ranks = tuple[int, ...]


class CopySums:
    """The partial copies in a domain's buckets, as views of their held gradients, by the ranks that share them."""

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, domain: Domain):
        self.mesh, self.replica = mesh, mesh.along(domain.model_axes)
        found: dict[Ranks, list[tuple[str, tuple[int, ...], Tensor]]] = {}
        for piece in (piece for bucket in buckets for piece in bucket.pieces(bucket.held_grads)):
            for box, start, view in piece.held() if piece.spec.domain == domain else ():
                if box.sum_over:
                    found.setdefault(box.sum_over, []).append((piece.name, start, view))
        # In one order on all ranks: groups by their ranks, boxes by name and place.
        ordered = {ranks: sorted(found[ranks], key=lambda item: item[:2]) for ranks in sorted(found)}
        self.groups = {ranks: [view for _, _, view in items] for ranks, items in ordered.items()}
        self._check(
            {ranks: [(name, start, tuple(v.shape)) for name, start, v in items] for ranks, items in ordered.items()}
        )

    def _check(self, mine: dict[Ranks, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]) -> None:
        """All that share a box must hold the same part of it. Collective over one replica."""
        everyone = dict(zip(self.replica.ranks, all_gather_objects(mine, self.replica), strict=True))
        for ranks, items in mine.items():
            for rank in ranks:
                assert everyone[rank].get(ranks) == items, f"ranks {ranks} hold different shards of what they share"

    def reduce(self) -> None:
        """Sum them. Collective over one replica."""
        for ranks, views in self.groups.items():
            if len(views) == 1 and views[0].is_contiguous():
                sum_over_ranks(views[0], ranks, self.mesh, self.replica)
                continue
            flat = sum_over_ranks(torch.cat([view.reshape(-1) for view in views]), ranks, self.mesh, self.replica)
            for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
