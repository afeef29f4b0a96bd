"""From a Hugging Face folder: into a run at any layout, or into a checkpoint of iteration 0.

Key idea: each rank reads, from any of the files, exactly the boxes that its specs name; nothing is sent between ranks.
A conversion reads a tensor only when the checkpoint's writer asks for it, so memory holds a few tensors, never the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalite.checkpoint import storage
from megalite.checkpoint.errors import agree, attempt, wanted_by_none
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.travel import FOLDER, read_small_files, tokenizer_of, write_small_files
from megalite.checkpoint.huggingface.weights import EMBEDDING, LogicalWeights, refuse_unused
from megalite.checkpoint.planner import parameter_name, whole_chunk
from megalite.checkpoint.shards import write_shards
from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import Piece
from megalite.nn.module import named_specs

BuildModel = Callable[[RunConfig, int, Mesh], nn.Module]
"""The whole model of a configuration and a vocabulary size, on the mesh's device."""


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
    used: set[str] = set()

    def prepare() -> None:
        found = read_huggingface_config(directory, None)  # asked where the run's network came from
        files = TensorFiles(directory)
        shapes = {name: piece.spec.shape for name, piece in wanted}
        weights = LogicalWeights(found.architecture, files, shapes, str(directory))
        opened.append((files, weights))
        used.update(files.stored.keys() - weights.unused(), map(weights.stored_name, left_out))
        if mesh.is_first:
            tied = not found.model.untie_embeddings_and_output_weights
            used.update(filter(None, [weights.check_tied_output(tied)]))

    agree(attempt(prepare), mesh.world)
    files, weights = opened[0]
    with files:
        unwanted = wanted_by_none(sorted(files.stored), used, mesh)
        agree(attempt(lambda: refuse_unused(weights.where, unwanted)), mesh.world)

        def fill() -> None:
            for name, piece in wanted:
                for _, start, view in piece.held():
                    box = [slice(a, a + n) for a, n in zip(start, view.shape, strict=True)]
                    view.copy_(weights.read(name, box))

        agree(attempt(fill), mesh.world)


def huggingface_to_megalite(source: Path, root: Path, build: BuildModel, ignored: Collection[str] = ()) -> list[str]:
    """Write `root/iter_0000000` and the tracker from the Hugging Face folder `source`; notes for the user.

    Each parameter keeps its stored number format; the run's is the embedding's. Tokenizer, templates and the original
    `config.json` are kept in `root/huggingface`. `ignored`: see `read_huggingface_config`. Raises a `CheckpointError`,
    and nothing of the attempt stays.
    """
    found = read_huggingface_config(source, ignored)
    config = RunConfig(model=found.model)
    config.model.model_vocab_size = found.vocab_size
    if found.classes is not None:
        config.finetune.task, config.finetune.class_names = "classification", list(found.classes)
    model = build(config, found.vocab_size, single_process_mesh("meta"))
    with TensorFiles(source) as files:
        shapes = {name: spec.shape for name, _, spec in named_specs(model)}
        weights = LogicalWeights(found.architecture, files, shapes, str(source))
        repeated = weights.check_tied_output(not found.model.untie_embeddings_and_output_weights)
        refuse_unused(str(source), [name for name in weights.unused() if name != repeated])
        config.precision = precision_of(weights.dtype(EMBEDDING))
        chunks = [
            whole_chunk(f"model.{name}", shape, weights.dtype(name), partial(weights.read_whole, name))
            for name, shape in shapes.items()
        ]
        state: dict[str, Any] = {"training": {}, "rng": None, "optimizer_steps": 0, "loss_scaler": {}, "schedule": {}}
        with storage.first_checkpoint(root, 0, FOLDER) as folder:
            kept = root / FOLDER
            write_small_files(kept, read_small_files(source))
            config.tokenizer = tokenizer_of((kept if isinstance(kept, Path) else source).resolve(), found.vocab_size)
            write_shards(folder, chunks, single_process_mesh().world)
            storage.write_documents(folder, storage.documents(config, state))
    return found.notes


def precision_of(dtype: torch.dtype) -> PrecisionConfig:
    """The precision of a run whose parameters are of `dtype`."""
    bf16, fp16, fp64 = (dtype == other for other in (torch.bfloat16, torch.float16, torch.float64))
    return PrecisionConfig(bf16=bf16, fp16=fp16, fp64=fp64)
