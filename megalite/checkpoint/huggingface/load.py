"""Start from a Hugging Face folder at any layout.

Key idea: each rank reads, from any of the files, exactly the boxes that its specs name. Nothing is sent between ranks,
and no rank ever holds more than one of its boxes twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from megalite.checkpoint.errors import agree, attempt
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.weights import LogicalWeights, refuse_unused
from megalite.checkpoint.planner import parameter_name
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece


@torch.no_grad()
def load_huggingface(
    directory: str | Path, *, mesh: Mesh, pieces: Iterable[Piece], left_out: Collection[str] = ()
) -> None:
    """Fill `pieces` of parameters, named as for `load_checkpoint`, from the folder. Collective over the world.

    Values are converted to each piece's dtype; rows of padding are left as they are. Every parameter must be there
    with its logical shape, and some rank must want every tensor that is there, but those of the parameters `left_out`.
    All ranks raise the same `CheckpointError`, naming tensors or file; pieces may then be filled in part.
    """
    wanted = [(parameter_name(piece.name), piece) for piece in pieces]
    opened: list[tuple[TensorFiles, LogicalWeights]] = []
    repeated: list[str] = []

    def prepare() -> None:
        found = read_huggingface_config(directory, None)  # asked where the run's network came from
        files = TensorFiles(directory)
        shapes = {name: piece.spec.shape for name, piece in wanted}
        weights = LogicalWeights(found.architecture, files, shapes, str(directory))
        opened.append((files, weights))
        if mesh.is_first:
            tied = not found.model.untie_embeddings_and_output_weights
            repeated.extend(filter(None, [weights.check_tied_output(tied)]))
        repeated.extend(weights.stored_names(left_out))

    agree(attempt(prepare), mesh.world)
    files, weights = opened[0]
    with files:
        _refuse_unwanted(weights, repeated, mesh)

        def fill() -> None:
            for name, piece in wanted:
                for _, start, view in piece.held():
                    box = [slice(a, a + n) for a, n in zip(start, view.shape, strict=True)]
                    view.copy_(weights.read(name, box))

        agree(attempt(fill), mesh.world)


def _refuse_unwanted(weights: LogicalWeights, repeated: list[str], mesh: Mesh) -> None:
    """Raise where the files hold tensors that no rank wants. Collective; all ranks see the same files."""
    names = sorted(weights.tensors.stored)
    unused = set(weights.unused()) - set(repeated)
    flags = torch.tensor([name not in unused for name in names], dtype=torch.uint8, device=mesh.device)
    all_reduce(flags, mesh.world, "max")
    unwanted = [name for name, flag in zip(names, flags.tolist(), strict=True) if not flag]
    agree(attempt(lambda: refuse_unused(weights.where, unwanted)), mesh.world)
