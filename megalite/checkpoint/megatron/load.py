"""From a checkpoint of Megatron-LM to one of ours, of iteration 0.

Key idea: our parameters are megatron-core's, with the same names and the same order of elements, so a parameter is a
stored tensor in another shape. One is read when it is written: memory holds a few tensors, never the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError, naming
from megalite.checkpoint.huggingface.load import BuildModel, precision_of
from megalite.checkpoint.huggingface.travel import FOLDER
from megalite.checkpoint.huggingface.weights import EMBEDDING, FLOATING, OUTPUT
from megalite.checkpoint.megatron.arguments import run_config
from megalite.checkpoint.megatron.joined import Joined
from megalite.checkpoint.megatron.ranks import holds_ranks, read_ranks
from megalite.checkpoint.megatron.torch_dist import holds_torch_dist, read_torch_dist
from megalite.checkpoint.planner import whole_chunk
from megalite.checkpoint.shards import write_shards
from megalite.config.errors import UserError, listed
from megalite.config.schema import RunConfig
from megalite.data.tokenizers import build_tokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import Shape
from megalite.nn.module import named_specs

RELEASE = "release"  # in place of an iteration: converted weights


@torch.no_grad()
def megatron_to_megalite(
    source: Path, root: Path, build: BuildModel, *, step: int | None = None, vocab_size: int | None = None
) -> list[str]:
    """Write `root/iter_0000000` and the tracker from Megatron-LM's folder `source`; notes for the user.

    `step`: the iteration to read; None: what its tracker says. `vocab_size`: rows of the embedding that aren't padding;
    None: as many as the tokenizer has ids. Each parameter keeps its number format. Optimizer state isn't converted.
    Raises a `CheckpointError`, and nothing of the attempt stays.
    """
    folder = find_folder(source, step)
    content, arguments, tensors = read_torch_dist(folder) if holds_torch_dist(folder) else read_ranks(folder)
    config, notes = run_config(arguments, str(folder))
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{folder} lacks {EMBEDDING}: it is no GPT, or only a part of one")
    rows, more = _rows(config, tensors[EMBEDDING].shape[0], vocab_size)
    config.model.model_vocab_size = rows
    shapes = {name: spec.shape for name, _, spec in named_specs(build(config, rows, single_process_mesh("meta")))}
    if not config.model.untie_embeddings_and_output_weights:
        _drop_copy(str(folder), tensors)
    _check(str(folder), tensors, shapes)
    config.precision = precision_of(tensors[EMBEDDING].dtype)
    chunks = [
        whole_chunk(f"model.{name}", shape, tensors[name].dtype, partial(_read, tensors[name], shape))
        for name, shape in shapes.items()
    ]
    state: dict[str, Any] = {"training": {}, "rng": None, "optimizer_steps": 0, "loss_scaler": {}, "schedule": {}}
    with storage.first_checkpoint(root, 0, FOLDER) as new:
        write_shards(new, chunks, single_process_mesh().world)
        storage.write_documents(new, storage.documents(config, state))
    target = root / storage.directory_name(0)
    begun = f"{target} = {folder}: weights after iteration {content.get('iteration', 0)}, without optimizer state"
    return [begun, *notes, *more]


def find_folder(source: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: that of iteration `step` or of the tracker in `source`, or `source` itself.

    Raises a `CheckpointError` that says what is there instead.
    """
    if not source.is_dir():
        raise CheckpointError(f"--megatron {source} is not a folder")
    _refuse_ours(source)
    if _is_checkpoint(source):
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: {source} is one checkpoint; give its parent folder")
        return source
    folder = source / (_tracked(source) if step is None else storage.directory_name(step))
    _refuse_ours(folder)
    if not folder.is_dir() or not _is_checkpoint(folder):
        there = sorted(path.name for path in source.iterdir() if path.is_dir() and _is_checkpoint(path))
        raise CheckpointError(
            f"{folder} is no checkpoint of Megatron-LM (with .metadata or mp_rank_00); in {source.name} are "
            f"{', '.join(there) or 'none'}"
        )
    return folder


def _refuse_ours(folder: Path) -> None:
    if (folder / storage.STATE_FILE).exists():
        raise CheckpointError(f"{folder} is a checkpoint of megalite: it needs no conversion")


def _is_checkpoint(folder: Path) -> bool:
    return holds_torch_dist(folder) or holds_ranks(folder)


def _tracked(source: Path) -> str:
    """The folder that the tracker names."""
    path = source / storage.TRACKER
    with naming(path, ValueError):
        text = path.read_text(encoding="utf-8").strip()
    if text != RELEASE and not text.isdigit():
        raise CheckpointError(f"{path} must hold an iteration or {RELEASE}, not {text[:40]!r}; choose with --ckpt-step")
    return text if text == RELEASE else storage.directory_name(int(text))


def _rows(config: RunConfig, stored: int, wanted: int | None) -> tuple[int, list[str]]:
    """Rows of the embedding without padding, and a note where they can't be told from it."""
    notes = []
    if wanted is None:
        try:
            wanted = build_tokenizer(config.tokenizer).vocab_size
        except UserError as error:
            wanted = stored
            notes = [
                f"all {stored} rows of the embedding are kept, padding too; cut it with --model-vocab-size ({error})"
            ]
    if not 0 < wanted <= stored:
        raise CheckpointError(f"the embedding has {stored} rows, not {wanted}: say how many with --model-vocab-size")
    return wanted, notes


def _drop_copy(where: str, tensors: dict[str, Joined]) -> None:
    """Leave out the last stage's copy of the embedding. A `CheckpointError` where it is another table."""
    copy = tensors.pop(OUTPUT, None)
    if copy is not None and not torch.equal(copy.read(), tensors[EMBEDDING].read()):
        raise CheckpointError(f"{where}: embedding and output are tied by its args, but {OUTPUT} is another table")


def _check(where: str, tensors: Mapping[str, Joined], shapes: Mapping[str, Shape]) -> None:
    """Raise a `CheckpointError` where the tensors aren't those of the network."""
    strange = sorted(tensors.keys() - shapes.keys())
    if strange:
        raise CheckpointError(f"{where} holds tensors that a GPT with its args doesn't have:{listed(strange)}")
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise CheckpointError(f"{where} lacks{listed(missing)}")
    other = [
        f"{name}: {tensors[name].shape}, but {expected} by its args"
        for name, shape in shapes.items()
        if tensors[name].shape != (expected := _stored_shape(name, shape, tensors[name].shape))
    ]
    if other:
        raise CheckpointError(f"{where} holds tensors of another shape:{listed(other)}")
    formats = [f"{name}: {tensors[name].dtype}" for name in shapes if tensors[name].dtype not in FLOATING]
    if formats:
        raise CheckpointError(f"{where} holds tensors that are neither fp64, fp32, bf16 nor fp16:{listed(formats)}")


def _stored_shape(name: str, shape: Shape, there: Shape) -> Shape:
    """Shape in Megatron-LM of a parameter of the logical `shape`: a matrix or a vector. Tables of the vocabulary may
    have more rows, for padding."""
    if name in (EMBEDDING, OUTPUT):
        return (max(there[0], shape[0]), *shape[1:])
    if name.endswith(".bias"):
        return (prod(shape),)
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape


def _read(tensor: Joined, shape: Shape) -> Tensor:
    return tensor.read(shape[0] if len(shape) == len(tensor.shape) else None).view(shape)
