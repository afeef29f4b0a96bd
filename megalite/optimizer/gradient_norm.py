"""The gradient norm: one number for the whole model.

Key idea: each logical parameter counts once, however it is cut, copied or tied: only a box's owner adds its squares.
Squares are summed per parameter in float64 and combined by name, exactly rounded, so the order of ranks has no part in
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.param_spec import Box
from megalite.distributed.pieces import Piece
from megalite.optimizer.buckets import Bucket


def global_names(buckets: Iterable[Bucket], mesh: Mesh) -> list[str]:
    """Names of all logical parameters of the model, sorted, equal on all ranks. Collective over one replica."""
    mine = [slot.name for bucket in buckets for slot in bucket.slots]
    return sorted({name for names in all_gather_objects(mine, mesh.model) for name in names})


def holders(mesh: Mesh, *, sharded: bool) -> Group:
    """Ranks among which every owned element of the model is held once."""
    return mesh.world if sharded else mesh.model


def counts(box: Box, rank: int) -> bool:
    """Whether `rank` is the one that counts a box. Owners are named within a replica; each replica has its own."""
    return box.owner == rank


class OwnedViews:
    """Views of what this rank counts, by parameter. `sharded`: the data-parallel ranks share it out."""

    def __init__(self, pieces: Iterable[Piece], names: Sequence[str], mesh: Mesh, *, sharded: bool):
        place = {name: index for index, name in enumerate(names)}
        self.count, self.device = len(names), mesh.device
        self.group = holders(mesh, sharded=sharded)
        owned = [(place[p.name], view) for p in pieces for box, _, view in p.held() if counts(box, mesh.rank)]
        self.views = [view for _, view in owned]
        self._places = torch.tensor([index for index, _ in owned], dtype=torch.int64, device=mesh.device)

    def squares(self) -> list[float]:
        """Sum of squares of every logical parameter, in the order of names. Collective over one replica, or the world
        where shared out. One transfer from the device."""
        totals = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        if self.views:
            norms = [torch.linalg.vector_norm(view, dtype=torch.float64) for view in self.views]
            totals.index_add_(0, self._places, torch.stack(norms).to(self.device).square())
        values: list[float] = all_reduce(totals, self.group).tolist()
        return values

    def zeros(self) -> int:
        """Elements that are exactly zero. Collective as `squares`."""
        count = sum(((view == 0).sum() for view in self.views), torch.zeros((), dtype=torch.int64, device=self.device))
        assert isinstance(count, Tensor)
        return int(all_reduce(count, self.group).item())


def combine(squares: list[float]) -> float:
    """The norm: the square root of the exactly rounded sum; not finite where any part isn't."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
