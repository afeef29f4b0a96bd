"""From a Hugging Face folder to a checkpoint of iteration 0, in one process.

Key idea: the checkpoint's writer asks for one tensor after the other, and each is read from the files only then. So
memory holds a few tensors, never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalite.checkpoint import storage
from megalite.checkpoint.huggingface.config import HuggingFaceModel, read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.travel import FOLDER, read_small_files, tokenizer_of, write_small_files
from megalite.checkpoint.huggingface.weights import EMBEDDING, LogicalWeights, refuse_unused
from megalite.checkpoint.planner import Chunk
from megalite.checkpoint.shards import write_shards
from megalite.checkpoint.streaming import later
from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import Shape
from megalite.nn.module import named_specs

BuildModel = Callable[[RunConfig, int, Mesh], nn.Module]
"""The whole model of a configuration and a vocabulary size, on the mesh's device."""


def huggingface_to_megalite(source: Path, root: Path, build: BuildModel, ignored: Collection[str] = ()) -> list[str]:
    """Write `root/iter_0000000` and the tracker from the Hugging Face folder `source`; notes for the user.

    Each parameter keeps its stored number format; the run's is the embedding's. Tokenizer, templates and the original
    `config.json` are kept in `root/huggingface`. `ignored`: see `read_huggingface_config`. Raises a `CheckpointError`,
    and nothing of the attempt stays.
    """
    found = read_huggingface_config(source, ignored)
    with TensorFiles(source) as files:
        config = RunConfig(model=found.model)
        config.model.model_vocab_size = found.vocab_size
        if found.classes is not None:
            config.finetune.task, config.finetune.class_names = "classification", list(found.classes)
        model = build(config, found.vocab_size, single_process_mesh("meta"))
        weights = _all_weights(source, found, files, {name: spec.shape for name, _, spec in named_specs(model)})
        config.precision = _precision(weights.dtype(EMBEDDING))
        chunks = {
            f"model.{name}": [later(shape, weights.dtype(name), partial(weights.read_whole, name))]
            for name, shape in weights.shapes.items()
        }
        _write(source, root, found, config, chunks)
    return found.notes


def _all_weights(
    source: Path, found: HuggingFaceModel, files: TensorFiles, shapes: Mapping[str, Shape]
) -> LogicalWeights:
    """The parameters, all of which are there, and no others."""
    weights = LogicalWeights(found.architecture, files, shapes, str(source))
    repeated = weights.check_tied_output(not found.model.untie_embeddings_and_output_weights)
    refuse_unused(str(source), [name for name in weights.unused() if name != repeated])
    return weights


def _precision(dtype: torch.dtype) -> PrecisionConfig:
    bf16, fp16, fp64 = (dtype == other for other in (torch.bfloat16, torch.float16, torch.float64))
    return PrecisionConfig(bf16=bf16, fp16=fp16, fp64=fp64)


def _write(
    source: Path, root: Path, found: HuggingFaceModel, config: RunConfig, chunks: dict[str, list[Chunk]]
) -> None:
    state: dict[str, Any] = {"training": {}, "rng": None, "optimizer_steps": 0, "loss_scaler": {}, "schedule": {}}
    with storage.first_checkpoint(root, 0, FOLDER) as folder:
        kept = root / FOLDER
        write_small_files(kept, read_small_files(source))
        config.tokenizer = tokenizer_of(kept.resolve(), found.vocab_size)
        write_shards(folder, chunks, single_process_mesh().world)
        storage.write_documents(folder, storage.documents(config, state))
