"""Data files: written through torch.distributed.checkpoint (DCP), read back here with every byte verified.

Key idea: DCP stores a chunk as a small uncompressed zip archive that `torch.save` makes, with a checksum in it. torch's
own reader skips that checksum and unpickles; this one takes the raw bytes and verifies them, so a flipped bit is an
error that names the file. Two threads each way overlap copying, checksums and the disk.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megalite.checkpoint.errors import CheckpointError, reason
from megalite.checkpoint.metadata import StoredChunk
from megalite.checkpoint.planner import Chunk, GlobalSavePlanner, Read
from megalite.distributed.mesh import Group
from megalite.files.atomic import sync

THREADS = 2
_RECORD = "archive/data/0"  # where torch.save puts the bytes of the one tensor
_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name


def write_shards(directory: Path, chunks: dict[str, list[Chunk]], group: Group, *, files: int = THREADS) -> None:
    """Write every member's chunks and the index into `directory`, synced to the disk. Collective. `files`: of each
    member, where it has so many chunks.

    Where a member fails, all raise the same `CheckpointError`, naming rank and file, once nobody writes any more.
    """
    alone = group.size == 1
    writer = _ShardWriter(directory, files)
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                dict(chunks),
                storage_writer=writer,
                planner=GlobalSavePlanner(),
                process_group=group.process_group,
                no_dist=alone,
            )
        except dcp.CheckpointException as failed:
            index, (error, _) = min(failed.failures.items())
            if isinstance(error, (CheckpointError, OSError)):
                raise CheckpointError(f"rank {group.ranks[index]}: {error}") from None
            raise RuntimeError(str(failed)) from None


class _NamedFiles(FileSystem):
    """Says which file failed: an error of a buffered write doesn't."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except (OSError, RuntimeError) as error:  # torch's writer raises either
            raise CheckpointError(f"{path}: {reason(error)}") from error


class _ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, but for its threads, which lose their failures and keep a copy of all that they have written.

    Nor does the index keep a path of this machine.
    """

    def __init__(self, directory: Path, files: int):
        super().__init__(directory)
        self.directory, self.files = directory, files
        self.fs = _NamedFiles()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """A rank that has nothing to write makes no file."""
        shares = [share for share in _share_out(plan.items, self.files) if share]
        names = [f"{plan.storage_data.prefix}{i}.distcp" for i in range(len(shares))]
        with ThreadPoolExecutor(THREADS) as pool:
            written = list(pool.map(partial(self._write_file, planner), names, shares))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done

    def _write_file(self, planner: SavePlanner, name: str, items: list[WriteItem]) -> list[WriteResult]:
        """The chunks one after the other, each with one copy in memory while it's written."""
        results = []
        with self.fs.create_stream(self.directory / name, "wb") as opened:
            stream = cast(BinaryIO, opened)
            for item in items:
                start = stream.tell()
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor)
                torch.save(_compact(data), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            sync(stream)
        return results


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with no more storage behind it than its own: `torch.save` writes all of that."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _share_out(items: Iterable[WriteItem], files: int) -> list[list[WriteItem]]:
    """The items in one list a file, of about equal numbers of elements."""
    shares: list[list[WriteItem]] = [[] for _ in range(files)]
    sizes = [0] * files
    for item in items:
        assert item.tensor_data is not None
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += prod(item.tensor_data.chunk.sizes)
    return shares


def read_shards(directory: Path, reads: Iterable[Read]) -> None:
    """Carry out all reads; dtypes are converted. Raises `CheckpointError` naming a file that is missing or damaged."""
    by_file: dict[str, dict[StoredChunk, list[Read]]] = {}
    for read in reads:
        by_file.setdefault(read.chunk.file, {}).setdefault(read.chunk, []).append(read)

    def read_file(name: str) -> None:
        path = directory / name
        try:
            with path.open("rb") as file:
                for chunk, parts in sorted(by_file[name].items(), key=lambda item: item[0].offset):
                    data = _read_chunk(file, chunk)
                    for part in parts:
                        slices = (slice(a, a + n) for a, n in zip(part.start, part.target.shape, strict=True))
                        part.target.copy_(data[tuple(slices)])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path}: {reason(error)}") from error

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read_file, by_file))


def _read_chunk(file: BinaryIO, chunk: StoredChunk) -> Tensor:
    """A stored chunk on the CPU, its checksum verified."""
    with zipfile.ZipFile(_Part(file, chunk.offset, chunk.length)) as archive:
        record = archive.getinfo(_RECORD)
    flat = torch.empty(prod(chunk.sizes), dtype=chunk.dtype)
    if record.file_size != flat.nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.file_size} bytes at {chunk.offset} instead of {flat.nbytes}")
    file.seek(chunk.offset + record.header_offset)
    header = file.read(_LOCAL_HEADER)
    name_and_padding = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    file.seek(name_and_padding, os.SEEK_CUR)
    target = flat.view(torch.uint8).numpy().data
    if file.readinto(target) != flat.nbytes or zlib.crc32(target) != record.CRC:  # type: ignore[attr-defined]
        raise ValueError(f"damaged: wrong checksum of the tensor at {chunk.offset}")
    return flat.view(chunk.sizes)


class _Part(io.RawIOBase):
    """A range of a file, as a file to read from."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
