"""Data files, in the format of torch.distributed.checkpoint (DCP): written, and read back with every byte verified.

Key idea: DCP stores a chunk as a small uncompressed zip archive that `torch.save` makes, with a checksum in it. torch's
own reader skips that checksum and unpickles; this one takes the raw bytes and verifies them, so a flipped bit is an
error that names the file. Two threads each way overlap copying, checksums and the disk.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalite.checkpoint.errors import agree, attempt, naming, on_first_rank
from megalite.checkpoint.metadata import Index, StoredChunk, TensorInfo, write_index
from megalite.checkpoint.planner import Chunk, Read
from megalite.checkpoint.storage import DATA_SUFFIX
from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.mesh import Group
from megalite.files.atomic import sync

THREADS = 2
_RECORD = "archive/data/0"  # where torch.save puts the bytes of the one tensor
_DIRECTORY = 4096  # bytes at the end of a chunk that hold the archive's list of its few entries, and more
_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name

Written = tuple[str, TensorInfo, StoredChunk]
"""Key, the logical tensor, and where a rectangle of it was put."""


def write_shards(directory: Path, chunks: Iterable[Chunk], group: Group, *, files: int = THREADS) -> None:
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


def _write_files(directory: Path, chunks: Iterable[Chunk], rank: int, files: int) -> list[Written]:
    """A rank that has nothing to write makes no file."""
    shares = [share for share in _share_out(chunks, files) if share]
    names = [f"__{rank}_{i}{DATA_SUFFIX}" for i in range(len(shares))]
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


def _write_file(directory: Path, name: str, chunks: Iterable[Chunk]) -> list[Written]:
    """The chunks one after the other, each with one copy in memory while it's written."""
    result = []
    with naming(directory / name, RuntimeError), open(directory / name, "wb") as stream:  # torch's writer raises either
        for chunk in chunks:
            start = stream.tell()
            torch.save(_compact(chunk.read()), stream)
            length = stream.tell() - start
            stored = StoredChunk(chunk.start, chunk.sizes, chunk.dtype, name, start, length)
            result.append((chunk.key, TensorInfo(chunk.shape, chunk.dtype), stored))
        sync(stream)
    return result


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, row-major, with no storage behind it but its own: `torch.save` writes all of that."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def read_shards(directory: Path, reads: Iterable[Read]) -> None:
    """Carry out all reads; dtypes are converted. Raises `CheckpointError` naming a file that is missing or damaged."""
    by_file: dict[str, dict[StoredChunk, list[Read]]] = {}
    for read in reads:
        by_file.setdefault(read.chunk.file, {}).setdefault(read.chunk, []).append(read)

    def read_file(name: str) -> None:
        path = directory / name
        with naming(path, ValueError, KeyError, zipfile.BadZipFile), path.open("rb") as file:
            for chunk, parts in sorted(by_file[name].items(), key=lambda item: item[0].offset):
                data = _read_chunk(file, chunk)
                for part in parts:
                    slices = (slice(a, a + n) for a, n in zip(part.start, part.target.shape, strict=True))
                    part.target.copy_(data[tuple(slices)])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read_file, by_file))


def _read_chunk(file: BinaryIO, chunk: StoredChunk) -> Tensor:
    """A stored chunk on the CPU, its checksum verified."""
    tail = chunk.offset + max(0, chunk.length - _DIRECTORY)
    file.seek(tail)
    with zipfile.ZipFile(io.BytesIO(file.read(chunk.offset + chunk.length - tail))) as archive:
        record = archive.getinfo(_RECORD)  # its place counts from `tail`, so it may be negative
    flat = torch.empty(prod(chunk.sizes), dtype=chunk.dtype)
    if record.file_size != flat.nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.file_size} bytes at {chunk.offset} instead of {flat.nbytes}")
    file.seek(tail + record.header_offset)
    header = file.read(_LOCAL_HEADER)
    name_and_padding = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    file.seek(name_and_padding, os.SEEK_CUR)
    target = flat.view(torch.uint8).numpy().data
    if file.readinto(target) != flat.nbytes or zlib.crc32(target) != record.CRC:  # type: ignore[attr-defined]
        raise ValueError(f"damaged: wrong checksum of the tensor at {chunk.offset}")
    return flat.view(chunk.sizes)
