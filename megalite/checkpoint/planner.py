"""From a rank's parameters to rectangles of logical tensors, and back.

Key idea: a checkpoint stores every parameter and moment as one logical tensor, in global coordinates and without
padding, however it was cut, copied or tied. So a parameter's boxes say what a rank writes, and the same boxes say what
it reads; neither side knows the other's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megalite.checkpoint.metadata import Index, StoredChunk
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Shape
from megalite.distributed.pieces import Piece

STATE_PREFIX = "optimizer."


def parameter_name(key: str) -> str:
    """The parameter that a key belongs to: NAME for both `model.NAME` and `optimizer.KIND.NAME`."""
    if key.startswith(STATE_PREFIX):
        return key.removeprefix(STATE_PREFIX).partition(".")[2]
    return key.removeprefix("model.")


@dataclass(frozen=True)
class Chunk:
    """A rectangle that this rank writes: `view` is the part from `start` on of the logical tensor of `shape`."""

    shape: Shape
    start: Shape
    view: Tensor


def owned_chunks(pieces: Iterable[Piece], mesh: Mesh) -> dict[str, list[Chunk]]:
    """What this rank writes, by key: of the boxes that it owns in its replica its shard, or where the replicas hold the
    same, a share by size.

    The name of a piece is its key, `model.NAME` or `optimizer.KIND.NAME`; pieces come in the same order on all
    replicas. Ranks at the same place of their replicas hold the same boxes, so all come to the same shares without
    asking each other.
    """
    written = [0] * mesh.dp_cp.size
    seen: set[tuple[str, Shape]] = set()
    result: dict[str, list[Chunk]] = {}
    for piece in pieces:
        for box, start, view in piece.held():
            if box.owner != mesh.rank or (piece.name, start) in seen:
                continue
            seen.add((piece.name, start))  # two chunks of one rank may hold tied copies
            writer = mesh.dp_cp.rank
            if not piece.sharded:
                writer = written.index(min(written))
                written[writer] += view.nbytes
            if writer == mesh.dp_cp.rank:
                result.setdefault(piece.name, []).append(Chunk(piece.spec.shape, start, view))
    return result


class GlobalSavePlanner(SavePlanner):
    """DCP's planner for a state dict of `Chunk` lists. The first rank checks that together they fill every tensor."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Chunk]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take this rank's chunks."""
        self._chunks = state_dict

    def create_local_plan(self) -> SavePlan:
        """One item for each chunk."""
        return SavePlan([_write_item(key, chunk) for key, chunks in self._chunks.items() for chunk in chunks])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The index of the whole checkpoint. Raises a ValueError where the ranks' chunks aren't one whole tensor."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                first = TensorStorageMetadata(data.properties, data.size, [])
                tensor = tensors.setdefault(item.index.fqn, first)
                if (tensor.size, tensor.properties.dtype) != (data.size, data.properties.dtype):
                    raise ValueError(f"{item.index.fqn} has different shapes or dtypes on different ranks")
                tensor.chunks.append(data.chunk)
        for key, tensor in tensors.items():
            held = sum(prod(chunk.sizes) for chunk in tensor.chunks)
            starts = {tuple(chunk.offsets) for chunk in tensor.chunks}
            if held != prod(tensor.size) or len(starts) != len(tensor.chunks):
                raise ValueError(f"{key}: {len(starts)} chunks hold {held} of {prod(tensor.size)} elements")
        return all_plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to adjust."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The data of a chunk, row-major, on its own device."""
        start = write_item.index.offset
        chunk = next(chunk for chunk in self._chunks[write_item.index.fqn] if chunk.start == start)
        return chunk.view.contiguous()


def _write_item(key: str, chunk: Chunk) -> WriteItem:
    offsets = torch.Size(chunk.start)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, chunk.view.size()),
        properties=TensorProperties(dtype=chunk.view.dtype),
        size=torch.Size(chunk.shape),
    )
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class Read:
    """Copy the part of a stored chunk that begins at `start` (in the chunk) into `target`, which gives its size."""

    chunk: StoredChunk
    start: Shape
    target: Tensor


@dataclass
class ReadPlan:
    """What fills a rank's tensors, and what keeps the checkpoint from doing so."""

    reads: list[Read] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # that were found
    missing: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # (stored, wanted) where they differ
    gaps: list[str] = field(default_factory=list)  # stored in part only


def plan_reads(pieces: Iterable[Piece], index: Index) -> ReadPlan:
    """Where in the checkpoint every box of `pieces` lies. Elements in no box (padding) are not touched."""
    plan = ReadPlan()
    for piece in pieces:
        key = piece.name
        if key not in index.metadata:
            plan.missing.append(key)
            continue
        plan.keys.add(key)
        stored = tuple(index.metadata[key].size)
        if stored != piece.spec.shape:
            plan.shapes[key] = (stored, piece.spec.shape)
            continue
        for _, start, view in piece.held():
            reads = list(_box_reads(key, start, view, index))
            if sum(read.target.numel() for read in reads) != view.numel():
                plan.gaps.append(key)
            plan.reads += reads
    return plan


def _box_reads(key: str, start: Sequence[int], view: Tensor, index: Index) -> Iterable[Read]:
    box = ChunkStorageMetadata(torch.Size(start), view.size())
    for item in create_read_items_for_chunk_list(key, index.metadata[key], [box]):
        assert item.storage_index.index is not None
        slices = tuple(slice(a, a + n) for a, n in zip(item.dest_offsets, item.lengths, strict=True))
        yield Read(index.chunks[key][item.storage_index.index], tuple(item.storage_offsets), view[slices])
