"""The gradient norm: one number for the whole model.

Key idea: each logical parameter counts once, however it is cut, copied or tied: only a box's owner adds its squares.
Squares are summed per parameter in float64 and combined by name, exactly rounded, so the order of ranks has no part in
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Mesh
from megalite.optimizer.buffers import FlatBuffer, Slot


def global_names(buffers: Iterable[FlatBuffer], mesh: Mesh) -> list[str]:
    """Names of all logical parameters of the model, sorted, equal on all ranks. Collective over one replica."""
    mine = [slot.name for buffer in buffers for slot in buffer.slots]
    return sorted({name for names in all_gather_objects(mine, mesh.model) for name in names})


def _owned_squares(slot: Slot, flat: Tensor, rank: int) -> Tensor:
    local = slot.view(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for box in slot.spec.boxes:
        # Owners are named within this replica; every data-parallel copy of the owner counts in its own replica.
        if box.owner == rank:
            total += torch.linalg.vector_norm(local[box.local_slices], dtype=torch.float64).square()
    return total


def squares_by_name(buffers: Iterable[FlatBuffer], names: list[str], mesh: Mesh, *, of: str = "grads") -> list[float]:
    """Sum of squares of every logical parameter's gradient (or `of="main"`: value), in the order of `names`.

    Collective over one replica (pipeline and tensor ranks). One transfer from the device.
    """
    place = {name: i for i, name in enumerate(names)}
    squares = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)
    for buffer in buffers:
        for slot in buffer.slots:
            squares[place[slot.name]] += _owned_squares(slot, getattr(buffer, of), mesh.rank)
    values: list[float] = all_reduce(squares, mesh.model).tolist()
    return values


def combine(squares: list[float]) -> float:
    """The norm: the square root of the exactly rounded sum; not finite where any part isn't."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
