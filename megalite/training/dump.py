"""`--dump-grads`: every logical parameter's whole gradient in one file, for proofs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.mesh import Mesh
from megalite.optimizer.optimizer import Optimizer


def gather_gradients(optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> dict[str, Tensor]:
    """Global name → full unscaled gradient on the CPU, assembled over the ranks of one replica. Collective over it."""
    parts: list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]] = []
    for buffer in optimizer.buffers:
        for slot in buffer.slots:
            local = slot.view(buffer.grads)
            for box in slot.spec.boxes:
                if box.owner == mesh.rank:
                    piece = (local[box.local_slices] / loss_scale).cpu()
                    parts.append((slot.name, slot.spec.shape, box.global_slices, piece))
    gradients: dict[str, Tensor] = {}
    for name, shape, where, piece in (part for parts_of in all_gather_objects(parts, mesh.model) for part in parts_of):
        if name not in gradients:
            gradients[name] = torch.zeros(shape, dtype=piece.dtype)
        gradients[name][where] = piece
    return gradients


def dump_gradients(directory: str, optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> None:
    """Write `directory/grads.safetensors` on the first rank. Collective over one replica."""
    gradients = gather_gradients(optimizer, mesh, loss_scale)
    if mesh.is_first:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file(gradients, Path(directory) / "grads.safetensors")
