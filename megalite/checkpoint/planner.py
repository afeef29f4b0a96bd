"""From a rank's parameters to rectangles of logical tensors, and back.

Key idea: a checkpoint stores every parameter and moment as one logical tensor, in global coordinates and without
padding, however it was cut, copied or tied. So a parameter's boxes say what a rank writes, and the same boxes say what
it reads; neither side knows the other's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.stored import Index, StoredChunk
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
    """A rectangle to write: of the logical tensor `key` of `shape` the part of `sizes` from `start` on. `read` gives it
    when its turn comes, on any device."""

    key: str
    shape: Shape
    start: Shape
    sizes: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        """What a data file calls it: the key, and of which part it is where it isn't all."""
        if self.sizes == self.shape:
            return self.key
        ranges = (f"{a}:{a + n}" for a, n in zip(self.start, self.sizes, strict=True))
        return f"{self.key}[{','.join(ranges)}]"


def whole_chunk(key: str, shape: Shape, dtype: torch.dtype, read: Callable[[], Tensor]) -> Chunk:
    """A chunk that is all of a logical tensor."""
    return Chunk(key, shape, (0,) * len(shape), shape, dtype, read)


def owned_chunks(pieces: Iterable[Piece], mesh: Mesh) -> list[Chunk]:
    """What this rank writes: of the boxes that it owns in its replica its shard, or where the replicas hold the same, a
    share by size.

    The name of a piece is its key, `model.NAME` or `optimizer.KIND.NAME`; pieces come in the same order on all
    replicas. Ranks at the same place of their replicas hold the same boxes, so all come to the same shares without
    asking each other.
    """
    written: dict[tuple[int, ...], list[int]] = {}
    seen: set[tuple[str, Shape]] = set()
    result = []
    for piece in pieces:
        group = mesh.along(piece.spec.domain.data_axes)
        sizes_written = written.setdefault(group.ranks, [0] * group.size)
        for box, start, view in piece.held():
            if box.owner != mesh.rank or (piece.name, start) in seen:
                continue
            seen.add((piece.name, start))  # two chunks of one rank may hold tied copies
            writer = group.rank
            if not piece.sharded:
                writer = sizes_written.index(min(sizes_written))
                sizes_written[writer] += view.nbytes
            if writer == group.rank:
                sizes = tuple(view.shape)
                dtype = view.dtype if piece.code is None else piece.code.dtype
                result.append(Chunk(piece.name, piece.spec.shape, start, sizes, dtype, partial(piece.numbers, view)))
    return result


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
        if key not in index.tensors:
            plan.missing.append(key)
            continue
        plan.keys.add(key)
        stored = index.tensors[key].shape
        if stored != piece.spec.shape:
            plan.shapes[key] = (stored, piece.spec.shape)
            continue
        for _, start, view in piece.held():
            reads = list(_reads(start, view, index.chunks[key]))
            if sum(read.target.numel() for read in reads) != view.numel():
                plan.gaps.append(key)
            plan.reads += reads
    return plan


def _reads(global_start: Shape, view: Tensor, chunks: Iterable[StoredChunk]) -> Iterator[Read]:
    """The parts of a rectangle that lie in the chunks."""
    for chunk in chunks:
        sides = zip(global_start, view.shape, chunk.start, chunk.sizes, strict=True)
        ranges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in sides]
        if all(low < high for low, high in ranges):
            start = tuple(low - b for (low, _), b in zip(ranges, chunk.start, strict=True))
            here = (slice(low - a, high - a) for (low, high), a in zip(ranges, global_start, strict=True))
            yield Read(chunk, start, view[tuple(here)])
