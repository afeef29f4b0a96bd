"""Save and load a run.

Key idea: both are the same few steps on every rank, and after each step that can fail all ranks agree on whether it
did. Tensors have global coordinates and lie in safetensors files; all else is JSON.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank, wanted_by_none
from megalite.checkpoint.huggingface.config import INERT
from megalite.checkpoint.huggingface.travel import keep
from megalite.checkpoint.index import check_files, read_index
from megalite.checkpoint.planner import STATE_PREFIX, Chunk, ReadPlan, owned_chunks, parameter_name, plan_reads
from megalite.checkpoint.shards import read_shards_together, write_shards
from megalite.checkpoint.storage import Retention
from megalite.checkpoint.stored import Index
from megalite.config.errors import listed
from megalite.config.fields import all_fields
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pieces import Piece
from megalite.files.remote import Place, Remote, place


@dataclass(frozen=True)
class Planned:
    """A checkpoint to write: `chunks` are read when they are written, so until then, or until they are staged, what
    they show may not change. `texts`, `beside`: small files by name."""

    root: Place
    iteration: int
    chunks: Sequence[Chunk]
    texts: Mapping[str, str]
    beside: Mapping[str, bytes]
    retain: Retention

    @property
    def target(self) -> Place:
        """Its folder, once it's complete."""
        return self.root / storage.directory_name(self.iteration)


def plan(
    root: Place,
    iteration: int,
    *,
    mesh: Mesh,
    pieces: Iterable[Piece],
    config: RunConfig,
    training_state: dict[str, Any],
    retain: Retention,
    beside: Mapping[str, bytes] | None = None,
) -> Planned:
    """Which rectangles this rank writes, and all that isn't tensors. Nothing is copied or written.

    `pieces`: all that this rank holds, parameters and optimizer state, named by their keys; in the same order on all
    replicas. `config`, `training_state` (JSON-ready) and `beside`, the small files to keep in `root` that the model was
    trained with (None: those there stay), are taken from rank 0.
    """
    texts = storage.documents(config, training_state)
    chunks = owned_chunks(pieces, mesh)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # the writing threads know nothing of this thread's streams
    return Planned(root, iteration, chunks, texts, beside or {}, retain)


def write_and_commit(planned: Planned, group: Group) -> Place:
    """Write all files, then give the checkpoint its name; its folder. Collective over `group`, all ranks.

    All raise the same `CheckpointError` where one of them fails, and nothing of the attempt stays.
    """
    try:
        write(planned, group)
        commit(planned, group)
    except CheckpointError as error:
        raise CheckpointError(f"{planned.target} was not saved: {error}") from error
    return planned.target


def write(planned: Planned, group: Group) -> None:
    """All of a checkpoint, under its temporary name. Collective."""
    root, iteration = planned.root, planned.iteration
    folder = storage.temporary(root, iteration)
    on_first_rank(lambda: storage.begin(root, iteration), group)
    with _abandoning(planned, group):
        unseen = f"{folder} isn't visible here: --save must name a folder that all machines share"
        agree(None if isinstance(folder, Remote) or folder.is_dir() else unseen, group)
        write_shards(folder, planned.chunks, group)
        on_first_rank(lambda: storage.write_documents(folder, planned.texts), group)


def commit(planned: Planned, group: Group) -> None:
    """Give a written checkpoint its name, move the tracker, and delete what it replaces. Collective."""
    root, iteration = planned.root, planned.iteration
    previous = storage.tracked_iteration(root) if group.rank == 0 else None
    with _abandoning(planned, group):
        on_first_rank(lambda: keep(root, planned.beside), group)
        on_first_rank(lambda: storage.commit(root, iteration), group)
    on_first_rank(lambda: storage.retire(root, iteration, previous, planned.retain), group)


@contextmanager
def _abandoning(planned: Planned, group: Group) -> Iterator[None]:
    """Remove the unfinished checkpoint where the block fails, which it does on all ranks alike."""
    try:
        yield
    except CheckpointError:
        on_first_rank(lambda: storage.abandon(planned.root, planned.iteration), group)
        raise


@torch.no_grad()
def load_checkpoint(
    directory: str | os.PathLike[str] | Remote, *, mesh: Mesh, pieces: Iterable[Piece], strict: bool = True
) -> None:
    """Fill `pieces`, named by their keys, from a checkpoint of any layout. Collective over the world.

    Each box of a spec is filled, converted to its piece's dtype; padding is left as it is. Every key must be there
    with the logical shape of its spec. With `strict`, some rank must want something of every parameter in the
    checkpoint. All ranks raise the same `CheckpointError`, naming keys or file; pieces may then be filled in part.
    """
    path = place(directory)
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
    read_shards_together(path, plan.reads, mesh)


def read_checkpoint_config(directory: str | os.PathLike[str] | Remote) -> RunConfig:
    """The configuration of the run that wrote a checkpoint."""
    path = place(directory) / storage.CONFIG_FILE
    values = storage.read_json(path)
    try:
        return RunConfig.from_dict(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a configuration of this version: {error}") from error


def read_training_state(directory: str | os.PathLike[str] | Remote) -> dict[str, Any]:
    """What was passed to `plan` as `training_state`."""
    return storage.read_json(place(directory) / storage.STATE_FILE)


def _refuse_misfits(path: Place, plan: ReadPlan) -> None:
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


def _refuse_unwanted(path: Place, index: Index, wanted: set[str], mesh: Mesh) -> None:
    """Raise where the checkpoint holds parameters that no rank wants. Collective; all ranks read the same index."""
    # State alone may be of a weight that is elsewhere: an adapter's checkpoint has FP8 histories of frozen layers.
    names = sorted({parameter_name(key) for key in index.tensors if not key.startswith(STATE_PREFIX)})
    unwanted = wanted_by_none(names, {parameter_name(key) for key in wanted}, mesh)
    if unwanted:
        advice = _hint(path)
        raise CheckpointError(f"{path} holds parameters that this network doesn't have:{listed(unwanted)}{advice}")


def _hint(path: Place, sizes: Collection[int] = (), *, tables: bool = False) -> str:
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
