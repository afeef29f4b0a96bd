"""`--dump-grads`: every logical parameter's whole gradient in one file, for proofs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.mesh import Mesh
from megalite.optimizer.gradient_norm import holders
from megalite.optimizer.optimizer import Optimizer


def gather_gradients(optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> dict[str, Tensor]:
    """Global name → full unscaled gradient on the CPU, assembled over the ranks that share it out. Collective."""
    parts: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]] = []
    for piece in optimizer.gradient_pieces():
        for box, start, view in piece.held():
            if box.owner == mesh.rank:
                parts.append((piece.name, piece.spec.shape, start, (view / loss_scale).cpu()))
    everyone = all_gather_objects(parts, holders(mesh, sharded=optimizer.sharding.state))
    gradients: dict[str, Tensor] = {}
    for name, shape, start, view in (part for parts_of in everyone for part in parts_of):
        if name not in gradients:
            gradients[name] = torch.zeros(shape, dtype=view.dtype)
        gradients[name][tuple(slice(a, a + n) for a, n in zip(start, view.shape, strict=True))] = view
    return gradients


def dump_gradients(directory: str, optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> None:
    """Write `directory/grads.safetensors` on the first rank. Collective."""
    gradients = gather_gradients(optimizer, mesh, loss_scale)
    if mesh.is_first:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file(gradients, Path(directory) / "grads.safetensors")
