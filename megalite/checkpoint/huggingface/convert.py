"""From a Hugging Face folder to a checkpoint of iteration 0, in one process.

Key idea: the checkpoint's writer asks for one tensor after the other, and each is read from the files only then. So
memory holds a few tensors, never the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import HuggingFaceModel, read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.travel import FOLDER, copy_small_files, tokenizer_of
from megalite.checkpoint.huggingface.weights import EMBEDDING, LogicalWeights, refuse_unused
from megalite.checkpoint.planner import Chunk
from megalite.checkpoint.shards import write_shards
from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import Shape
from megalite.nn.module import named_specs

BuildModel = Callable[[RunConfig, int, Mesh], nn.Module]
"""The whole model of a configuration and a vocabulary size, on the mesh's device."""


@dataclass(frozen=True)
class _Later:
    """Stands for a tensor in a `Chunk` until it is written: what the writer needs of one, and no more."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def contiguous(self) -> Tensor:
        return self.read().contiguous()


def huggingface_to_megalite(source: Path, root: Path, build: BuildModel) -> Path:
    """Write `root/iter_0000000` and the tracker from the Hugging Face folder `source`; the new folder.

    Each parameter keeps its stored number format; the run's is the embedding's. Tokenizer, templates and the original
    `config.json` are kept in `root/huggingface`. Raises a `CheckpointError`, and nothing of the attempt stays.
    """
    if storage.find_checkpoint(root) is not None:
        raise CheckpointError(f"--save {root} already holds checkpoints: choose a new folder")
    found = read_huggingface_config(source)
    with TensorFiles(source) as files:
        config = RunConfig(model=found.model)
        config.model.model_vocab_size = found.vocab_size
        model = build(config, found.vocab_size, single_process_mesh("meta"))
        weights = _all_weights(source, found, files, {name: spec.shape for name, _, spec in named_specs(model)})
        config.precision = _precision(weights.dtype(EMBEDDING))
        chunks = {f"model.{name}": [_later(weights, name)] for name in weights.parts}
        return _write(source, root, found, config, chunks)


def _all_weights(
    source: Path, found: HuggingFaceModel, files: TensorFiles, shapes: Mapping[str, Shape]
) -> LogicalWeights:
    """The parameters, all of which are there, and no others."""
    weights = LogicalWeights(found.architecture, files, shapes, str(source))
    repeated = weights.check_tied_output(not found.model.untie_embeddings_and_output_weights)
    refuse_unused(str(source), [name for name in weights.unused() if name != repeated])
    return weights


def _later(weights: LogicalWeights, name: str) -> Chunk:
    shape = weights.shapes[name]
    view = _Later(shape, weights.dtype(name), lambda: weights.read_whole(name))
    return Chunk(shape, (0,) * len(shape), cast(Tensor, view))


def _precision(dtype: torch.dtype) -> PrecisionConfig:
    bf16, fp16, fp64 = (dtype == other for other in (torch.bfloat16, torch.float16, torch.float64))
    return PrecisionConfig(bf16=bf16, fp16=fp16, fp64=fp64)


def _write(
    source: Path, root: Path, found: HuggingFaceModel, config: RunConfig, chunks: dict[str, list[Chunk]]
) -> Path:
    kept = root / FOLDER
    made = not root.exists()
    state: dict[str, Any] = {"training": {}, "rng": None, "optimizer_steps": 0, "loss_scaler": {}, "schedule": {}}
    if kept.exists():
        raise CheckpointError(f"{kept} exists: choose a new folder for --save")
    try:
        folder = storage.begin(root, 0)
        copy_small_files(source, kept, config=True)
        config.tokenizer = tokenizer_of(kept.resolve(), found.vocab_size)
        write_shards(folder, chunks, single_process_mesh().world)
        storage.write_documents(folder, storage.documents(config, state))
        return storage.commit(root, 0)
    except BaseException:
        storage.abandon(root, 0)
        shutil.rmtree(kept, ignore_errors=True)
        if made:
            shutil.rmtree(root, ignore_errors=True)
        raise
