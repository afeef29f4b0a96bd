"""Data files: written by all ranks, and read back with every byte verified.

Key idea: every rank writes safetensors files of its own, block by block, and the index says what lies where. Ranks that
load are often copies of each other, or want columns of the same rows. So a block is read from the disk by one of them,
which hands the others what they want of it; and what nobody wants isn't read. Two threads each way overlap copying,
checksums and the disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import NamedTuple
from zipfile import BadZipFile

import torch
from torch import Tensor

from megalite.checkpoint.errors import agree, attempt, naming, on_first_rank
from megalite.checkpoint.index import write_index
from megalite.checkpoint.planner import Chunk, Read
from megalite.checkpoint.storage import DATA_SUFFIX
from megalite.checkpoint.stored import Index, StoredChunk, TensorInfo
from megalite.checkpoint.tensor_file import Entry, write_safetensors
from megalite.distributed.collectives import all_gather_objects, exchange
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.param_spec import Shape
from megalite.files.atomic import writing
from megalite.files.remote import Place

THREADS = 2
ROUND = 64 << 20
"""Bytes that a rank reads, at least, before it hands others their parts."""

Written = tuple[str, TensorInfo, StoredChunk]
"""Key, the logical tensor, and where a rectangle of it was put."""


def write_shards(directory: Place, chunks: Iterable[Chunk], group: Group, *, files: int = THREADS) -> None:
    """Write every member's chunks and the index into `directory`, synced to the disk. Collective. `files`: of each
    member, where it has so many chunks.

    Where a member fails, all raise the same `CheckpointError`, naming rank and file, once nobody writes any more.
    """
    written: list[Written] = []
    agree(attempt(lambda: written.extend(_write_files(directory, chunks, group.rank, files))), group)
    index = Index({}, {})
    for theirs in all_gather_objects(written, group):
        for key, info, stored in theirs:
            assert index.tensors.setdefault(key, info) == info, f"{key}: {info} and {index.tensors[key]}"
            index.chunks.setdefault(key, []).append(stored)
    on_first_rank(lambda: write_index(directory, index), group)


def _write_files(directory: Place, chunks: Iterable[Chunk], rank: int, files: int) -> list[Written]:
    """A rank that has nothing to write makes no file."""
    shares = [share for share in _share_out(chunks, files) if share]
    names = [f"rank{rank:05d}_{i}{DATA_SUFFIX}" for i in range(len(shares))]
    with ThreadPoolExecutor(THREADS) as pool:
        return [one for written in pool.map(partial(_write_file, directory), names, shares) for one in written]


def _share_out(chunks: Iterable[Chunk], files: int) -> list[list[Chunk]]:
    """The chunks in one list a file, of about equal numbers of elements."""
    shares: list[list[Chunk]] = [[] for _ in range(files)]
    sizes = [0] * files
    for chunk in chunks:
        smallest = sizes.index(min(sizes))
        shares[smallest].append(chunk)
        sizes[smallest] += prod(chunk.sizes)
    return shares


def _write_file(directory: Place, name: str, chunks: Sequence[Chunk]) -> list[Written]:
    """The chunks one after the other, each with one copy in memory while it's written."""
    by_name = {chunk.name: chunk for chunk in chunks}
    entries = [Entry(named, chunk.sizes, chunk.dtype, chunk.read) for named, chunk in by_name.items()]
    with naming(directory / name), writing(directory / name) as stream:
        written = write_safetensors(stream, entries, {"format": "pt"})
    result = []
    for entry, blocks in written:
        chunk = by_name[entry.name]
        for start, sizes, offset, checksum in blocks:
            place = tuple(a + b for a, b in zip(chunk.start, start, strict=True))
            stored = StoredChunk(place, sizes, chunk.dtype, name, offset, checksum)
            result.append((chunk.key, TensorInfo(chunk.shape, chunk.dtype), stored))
    return result


def read_shards(directory: Place, reads: Iterable[Read]) -> None:
    """Carry out all reads; dtypes are converted. Raises `CheckpointError` naming a file that is missing or damaged."""
    parts = _by_chunk(reads)

    def fill(chunk: StoredChunk) -> None:
        data = _read_chunk(directory, chunk)
        for read in parts[chunk]:
            read.target.copy_(_part(data, read.start, tuple(read.target.shape)))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, parts))


def _by_chunk(reads: Iterable[Read]) -> dict[StoredChunk, list[Read]]:
    """In the order in which the chunks lie in the files."""
    parts: dict[StoredChunk, list[Read]] = {}
    for read in reads:
        parts.setdefault(read.chunk, []).append(read)
    return dict(sorted(parts.items(), key=lambda item: (item[0].file, item[0].offset)))


def _part(data: Tensor, start: Shape, sizes: Shape) -> Tensor:
    return data[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]


def _read_chunk(directory: Place, chunk: StoredChunk) -> Tensor:
    """A stored chunk on the CPU, its checksum verified."""
    path = directory / chunk.file
    flat = torch.empty(prod(chunk.sizes), dtype=chunk.dtype)
    with naming(path, ValueError, KeyError, BadZipFile), path.open("rb") as file:
        offset, checksum = chunk.find(file)
        file.seek(offset)
        target = flat.view(torch.uint8).numpy().data
        if file.readinto(target) != flat.nbytes or zlib.crc32(target) != checksum:
            raise ValueError(f"damaged: wrong checksum of the tensor at {chunk.offset}")
    return flat.view(chunk.sizes)


class _Want(NamedTuple):
    """What a rank wants of a chunk: rectangles in it, as (start, sizes)."""

    nbytes: int
    parts: list[tuple[Shape, Shape]]


_Place = tuple[str, int]  # file and offset: what all ranks call a chunk


def read_shards_together(directory: Place, reads: Iterable[Read], mesh: Mesh) -> int:
    """As `read_shards`, with each chunk read by one of the ranks that want it; how many bytes this one read. Collective
    over the world, where all raise the same `CheckpointError`."""
    if mesh.world.size == 1:
        read_shards(directory, parts := list(reads))
        return sum(chunk.nbytes for chunk in _by_chunk(parts))
    mine = {(chunk.file, chunk.offset): parts for chunk, parts in _by_chunk(reads).items()}
    told = {
        place: _Want(parts[0].chunk.nbytes, [(read.start, tuple(read.target.shape)) for read in parts])
        for place, parts in mine.items()
    }
    wanted: list[dict[_Place, _Want]] = all_gather_objects(told, mesh.world)
    done = 0
    for turn in _turns(wanted):
        read: dict[_Place, Tensor] = {}

        def read_mine(places: Sequence[_Place] = turn[mesh.rank], read: dict[_Place, Tensor] = read) -> None:
            with ThreadPoolExecutor(THREADS) as pool:
                chunks = [mine[place][0].chunk for place in places]
                read.update(zip(places, pool.map(partial(_read_chunk, directory), chunks), strict=True))

        agree(attempt(read_mine), mesh.world)
        done += sum(data.nbytes for data in read.values())
        _hand_out(turn, read, mine, wanted, mesh)
    return done


def _turns(wanted: Sequence[dict[_Place, _Want]]) -> Iterator[list[list[_Place]]]:
    """Turn for turn what each rank reads. Ranks that want the same take chunks by the bytes that they have already."""
    wanting: dict[_Place, list[int]] = {}
    for rank, theirs in enumerate(wanted):
        for place in theirs:
            wanting.setdefault(place, []).append(rank)
    loads, queues = [0] * len(wanted), [list[_Place]() for _ in wanted]
    for place, ranks in sorted(wanting.items()):
        reader = min(ranks, key=lambda rank: loads[rank])
        loads[reader] += wanted[reader][place].nbytes
        queues[reader].append(place)
    turns = [list(_rounds(queue, theirs)) for queue, theirs in zip(queues, wanted, strict=True)]
    for number in range(max(map(len, turns))):
        yield [theirs[number] if number < len(theirs) else [] for theirs in turns]


def _rounds(queue: Sequence[_Place], wants: dict[_Place, _Want]) -> Iterator[list[_Place]]:
    """The queue in parts of about `ROUND` bytes."""
    part: list[_Place] = []
    for place in queue:
        part.append(place)
        if sum(wants[one].nbytes for one in part) >= ROUND:
            yield part
            part = []
    if part:
        yield part


def _hand_out(
    turn: Sequence[Sequence[_Place]],
    read: dict[_Place, Tensor],
    mine: dict[_Place, list[Read]],
    wanted: Sequence[dict[_Place, _Want]],
    mesh: Mesh,
) -> None:
    """Fill all ranks' targets with their parts of what was read in a turn. Collective over the world."""

    def parcel(rank: int) -> Tensor:
        """All that `rank` wants of what this one has read, as bytes."""
        places = (place for place in turn[mesh.rank] if place in wanted[rank])
        parts = [_part(read[place], *part) for place in places for part in wanted[rank][place].parts]
        flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)

    others = [rank for rank in range(mesh.world.size) if rank != mesh.rank]
    coming = {rank: [part for place in turn[rank] for part in mine.get(place, ())] for rank in others}
    sizes = {rank: sum(_nbytes(part) for part in parts) for rank, parts in coming.items()}
    received = exchange({rank: parcel(rank) for rank in others}, sizes, mesh)
    for rank, parts in coming.items():
        offset = 0
        for part in parts:
            data = received[rank][offset : offset + _nbytes(part)].clone()  # at an address that suits its format
            part.target.copy_(data.view(part.chunk.dtype).view(part.target.shape))
            offset += len(data)
    for place, data in read.items():
        for part in mine[place]:
            part.target.copy_(_part(data, part.start, tuple(part.target.shape)))


def _nbytes(read: Read) -> int:
    return read.target.numel() * read.chunk.dtype.itemsize
