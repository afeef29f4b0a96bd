"""The gradient norm: one number for the whole model.

Key idea: each logical parameter counts once, however it is cut, copied or tied: only a box's owner adds its squares.
Squares are summed per parameter in float64 and combined by name, exactly rounded, so the order of parameters plays no
part. Only within rows of 4,096 elements of large parameters are they summed in the wide dtype: a sum of
squares in float64 takes six times as long as the whole update, and these sums are good to 1e-8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.layout import DOMAINS
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, is_counted_here
from megalite.optimizer.buckets import ROW, Bucket, alignment_of


def global_names(buckets: Iterable[Bucket], mesh: Mesh) -> list[str]:
    """Names of all logical parameters of the model, sorted, equal on all ranks. Collective over each replica."""
    mine = [slot.name for bucket in buckets for slot in bucket.slots]
    replicas = [mesh.along(domain.model_axes) for domain in DOMAINS]
    return sorted({name for replica in replicas for names in all_gather_objects(mine, replica) for name in names})


class OwnedViews:
    """Views of what this rank, alone in the world, counts, by parameter."""

    def __init__(self, pieces: Iterable[Piece], names: Sequence[str], mesh: Mesh, wide: torch.dtype):
        """`wide`: what squares are summed in within rows."""
        self._wide = wide
        place = {name: index for index, name in enumerate(names)}
        self.count, self.device, self.world = len(names), mesh.device, mesh.world
        self.views: list[Tensor] = []
        self._rows: list[Tensor] = []  # [rows, ROW]
        self._rest: list[Tensor] = []
        rows, rest = [], []
        # Backwards: the update, which begins at the front, then finds there what was read last in the cache.
        for piece in reversed(list(pieces)):
            for box, run, start in piece.runs():
                if is_counted_here(piece, box, mesh):
                    self.views.append(run)
                    whole_rows, others = _split(run, start, piece, wide)
                    self._rows += whole_rows
                    self._rest += others
                    rows += [place[piece.name]] * len(whole_rows)
                    rest += [place[piece.name]] * len(others)
        self._places = torch.tensor(rows + rest, dtype=torch.int64, device=mesh.device)

    def squares(self) -> list[float]:
        """Sum of squares of every logical parameter, in the order of names. Collective over the world. One transfer
        from the device."""
        totals = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        norms = (torch.linalg.vector_norm(rows, dim=1, dtype=self._wide) for rows in self._rows)
        sums = [each.to(torch.float64).square().sum() for each in norms]
        sums += [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in self._rest]
        if sums:
            # Main parameters may be on the host in part.
            totals.index_add_(0, self._places, torch.stack([value.to(self.device) for value in sums]))
        values: list[float] = all_reduce(totals, self.world).tolist()
        return values

    def zeros(self) -> int:
        """Elements that are exactly zero. Collective as `squares`."""
        count = sum(((view == 0).sum() for view in self.views), torch.zeros((), dtype=torch.int64, device=self.device))
        assert isinstance(count, Tensor)
        return int(all_reduce(count, self.world).item())


def _split(run: Tensor, start: int, piece: Piece, wide: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The whole rows of a run that begins at `start` of its parameter, and what is before and after them.

    Rows are counted from the parameter's beginning, and shards end between rows: however it is sharded, the same
    elements make up a row. Float64 and small parameters are summed without rows.
    """
    if wide == torch.float64 or alignment_of(piece.spec) < ROW:
        return [], [run]
    head = min(-start % ROW, run.numel())
    body = (run.numel() - head) // ROW * ROW
    whole = [run[head : head + body].view(-1, ROW)] if body else []
    return whole, [part for part in (run[:head], run[head + body :]) if part.numel()]


def combine(squares: list[float]) -> float:
    """The norm: the square root of the exactly rounded sum; not finite where any part isn't."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
