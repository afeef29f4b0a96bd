"""Save and load a run.

Key idea: both are the same few steps on every rank, and after each step that can fail all ranks agree on whether it
did. Tensors have global coordinates, in the format of torch.distributed.checkpoint; all else is JSON.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank, wanted_by_none
from megalite.checkpoint.huggingface.config import INERT
from megalite.checkpoint.huggingface.travel import keep
from megalite.checkpoint.metadata import Index, check_files, read_index
from megalite.checkpoint.planner import STATE_PREFIX, Chunk, ReadPlan, owned_chunks, parameter_name, plan_reads
from megalite.checkpoint.shards import read_shards, write_shards
from megalite.checkpoint.storage import Retention
from megalite.config.errors import listed
from megalite.config.fields import all_fields
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece


def save_checkpoint(
    root: Path,
    iteration: int,
    *,
    mesh: Mesh,
    pieces: Iterable[Piece],
    config: RunConfig,
    training_state: dict[str, Any],
    retain: Retention,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `root/iter_0000100/` and, last, the tracker; then delete what `retain` lets go of. Collective (world).

    `pieces`: all that this rank holds, parameters and optimizer state, named by their keys; in the same order on all
    replicas. `config`, `training_state` (JSON-ready) and `beside`, the small files to keep in `root` that the model was
    trained with (None: those there stay), are taken from rank 0. Where any rank fails all raise the same
    `CheckpointError`, nothing of the attempt stays, and the checkpoints before it are as they were. Returns the new
    folder.
    """
    target = root / storage.directory_name(iteration)
    # Plan: chunks that are read when they are written. A save that trains on meanwhile would copy them first.
    chunks, texts = owned_chunks(pieces, mesh), storage.documents(config, training_state)
    previous = storage.tracked_iteration(root) if mesh.is_first else None
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # the writing threads know nothing of this thread's streams
    try:
        on_first_rank(lambda: storage.begin(root, iteration), mesh.world)
        try:
            _write(root, iteration, chunks, texts, mesh)
            on_first_rank(lambda: keep(root, beside or {}), mesh.world)
            on_first_rank(lambda: storage.commit(root, iteration), mesh.world)
        except CheckpointError:  # on all ranks alike
            on_first_rank(lambda: storage.abandon(root, iteration), mesh.world)
            raise
    except CheckpointError as error:
        raise CheckpointError(f"{target} was not saved: {error}") from error
    on_first_rank(lambda: storage.retire(root, iteration, previous, retain), mesh.world)
    return target


def _write(root: Path, iteration: int, chunks: Sequence[Chunk], texts: Mapping[str, str], mesh: Mesh) -> None:
    """All of a checkpoint, under its temporary name. Collective."""
    folder = storage.temporary(root, iteration)
    unseen = f"{folder} isn't visible here: --save must name a folder that all machines share"
    agree(None if folder.is_dir() else unseen, mesh.world)
    write_shards(folder, chunks, mesh.world)
    on_first_rank(lambda: storage.write_documents(folder, texts), mesh.world)


@torch.no_grad()
def load_checkpoint(
    directory: str | os.PathLike[str], *, mesh: Mesh, pieces: Iterable[Piece], strict: bool = True
) -> None:
    """Fill `pieces`, named by their keys, from a checkpoint of any layout. Collective over the world.

    Each box of a spec is filled, converted to its piece's dtype; padding is left as it is. Every key must be there
    with the logical shape of its spec. With `strict`, some rank must want something of every parameter in the
    checkpoint. All ranks raise the same `CheckpointError`, naming keys or file; pieces may then be filled in part.
    """
    path = Path(directory)
    index, plan = Index({}, {}), ReadPlan()

    def prepare() -> None:
        nonlocal index, plan
        index = read_index(path)
        plan = plan_reads(pieces, index)
        _refuse_misfits(path, plan)
        files = index.files
        check_files(path, {read.chunk.file: files[read.chunk.file] for read in plan.reads})

    agree(attempt(prepare), mesh.world)
    if strict:
        _refuse_unwanted(path, index, plan.keys, mesh)
    agree(attempt(lambda: read_shards(path, plan.reads)), mesh.world)


def read_checkpoint_config(directory: str | os.PathLike[str]) -> RunConfig:
    """The configuration of the run that wrote a checkpoint."""
    path = Path(directory, storage.CONFIG_FILE)
    values = storage.read_json(path)
    try:
        return RunConfig.from_dict(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a configuration of this version: {error}") from error


def read_training_state(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What was passed to `save_checkpoint` as `training_state`."""
    return storage.read_json(Path(directory, storage.STATE_FILE))


def _refuse_misfits(path: Path, plan: ReadPlan) -> None:
    """Raise where the checkpoint can't fill what this rank wants, with the flags that are probably wrong."""
    if plan.shapes:
        lines = (f"{key}: {stored} in the checkpoint, {here} in the run" for key, (stored, here) in plan.shapes.items())
        # A weight of other dims is one of another kind of network, whatever its sizes are.
        alike = [pair for pair in plan.shapes.values() if len(pair[0]) == len(pair[1])]
        sizes = {a for stored, here in alike for a in set(stored) - set(here)}
        tables = all(parameter_name(key).startswith(("embedding.", "output_layer.")) for key in plan.shapes)
        advice = _hint(path, sizes, tables=tables)
        raise CheckpointError(f"{path} holds tensors of other shapes:{listed(lines)}{advice}")
    if plan.missing:
        advice = _hint(path)
        if all(key.startswith(STATE_PREFIX) for key in plan.missing):
            advice = "\n--no-load-optim loads the weights and starts with new optimizer state."
        raise CheckpointError(f"{path} lacks{listed(plan.missing)}{advice}")
    if plan.gaps:
        raise CheckpointError(f"{path} holds only parts of{listed(plan.gaps)}")


def _refuse_unwanted(path: Path, index: Index, wanted: set[str], mesh: Mesh) -> None:
    """Raise where the checkpoint holds parameters that no rank wants. Collective; all ranks read the same index."""
    # State alone may be of a weight that is elsewhere: an adapter's checkpoint has FP8 histories of frozen layers.
    names = sorted({parameter_name(key) for key in index.tensors if not key.startswith(STATE_PREFIX)})
    unwanted = wanted_by_none(names, {parameter_name(key) for key in wanted}, mesh)
    if unwanted:
        advice = _hint(path)
        raise CheckpointError(f"{path} holds parameters that this network doesn't have:{listed(unwanted)}{advice}")


def _hint(path: Path, sizes: Collection[int] = (), *, tables: bool = False) -> str:
    """The checkpoint's network as flags, those first whose value is one of `sizes`. `tables`: only those over the
    vocabulary have another shape."""
    try:
        config = read_checkpoint_config(path)
    except CheckpointError:
        return ""
    sections = {"model": config.model, "tokenizer": config.tokenizer}
    fields = [field for field in all_fields().values() if field.section in sections and field.name not in INERT]
    values = {field.name: getattr(sections[field.section], field.name) for field in fields}
    flags = {field.name: field.show(values[field.name]) for field in fields if values[field.name] != field.default}
    likely = [flag for name, flag in flags.items() if type(values[name]) is int and values[name] in sizes]
    cause = f"the checkpoint has {', '.join(likely)}" if likely else "another tokenizer or --vocab-size"
    text = f"\nLikely cause: {cause}." if likely or tables else ""
    return f"{text}\nIt was written with {' '.join(flags.values())}; --use-checkpoint-args uses the same network."
