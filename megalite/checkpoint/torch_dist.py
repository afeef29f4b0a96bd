"""Checkpoints in the format of torch.distributed.checkpoint (DCP), read: those of older versions and Megatron-LM's.

Key idea: DCP keeps its index in `.metadata`, a pickle, and a pickle can run any code. So it's read with an unpickler
that knows the index's own classes and nothing else. A chunk is a small uncompressed zip archive that `torch.save` made;
the raw bytes are taken from it, and the checksum that is in it too.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megalite.checkpoint.errors import CheckpointError, reason
from megalite.checkpoint.stored import Index, StoredChunk, TensorInfo, check_place
from megalite.files.remote import Place

INDEX_FILE = ".metadata"

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
_RECORD = "archive/data/0"  # where torch.save puts the bytes of the one tensor
_DIRECTORY = 4096  # bytes at the end of a chunk that hold the archive's list of its few entries, and more
_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name


@dataclass(frozen=True)
class ArchivedChunk(StoredChunk):
    """A chunk in an archive of `length` bytes that begins at `offset`; its checksum is in there."""

    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def find(self, file: BinaryIO) -> tuple[int, int]:
        tail = self.offset + max(0, self.length - _DIRECTORY)
        file.seek(tail)
        with zipfile.ZipFile(io.BytesIO(file.read(self.stop - tail))) as archive:
            record = archive.getinfo(_RECORD)  # its place counts from `tail`, so it may be negative
        if record.file_size != self.nbytes or record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{record.file_size} bytes at {self.offset} instead of {self.nbytes}")
        file.seek(tail + record.header_offset)
        header = file.read(_LOCAL_HEADER)
        name_and_padding = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return file.seek(name_and_padding, os.SEEK_CUR), record.CRC


class IndexUnpickler(pickle.Unpickler):
    """Knows the names that an index of ours has, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a checkpoint's index never does")


def read_index(
    directory: Place,
    unpickler: type[IndexUnpickler] = IndexUnpickler,
    wanted: Callable[[str, object], bool] = lambda key, entry: True,
) -> Index:
    """The index of the checkpoint in `directory`, of the entries that are `wanted`, which must be tensors. Raises
    `CheckpointError` where it is missing, damaged or hostile."""
    path, index = directory / INDEX_FILE, Index({}, {})
    try:
        with path.open("rb") as file:
            metadata = unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        for key, entry in metadata.state_dict_metadata.items():
            if not wanted(key, entry):
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"{key} is not a tensor")
            index.tensors[key] = TensorInfo(tuple(entry.size), entry.properties.dtype)
            index.chunks[key] = _stored_chunks(key, entry, metadata.storage_data)
    except Exception as error:  # damaged bytes can make an unpickler raise anything
        raise CheckpointError(f"{path} is not a checkpoint's index: {reason(error)}") from error
    return index


def _stored_chunks(key: str, tensor: TensorStorageMetadata, storage_data: Any) -> list[StoredChunk]:
    """The chunks of one tensor. Raises where the index contradicts itself."""
    dtype = tensor.properties.dtype
    result: list[StoredChunk] = []
    for chunk in tensor.chunks:
        stored = storage_data[MetadataIndex(key, chunk.offsets)]
        check_place(key, stored.relative_path, stored.offset)
        if min(0, *chunk.offsets, *chunk.sizes) < 0 or stored.length < prod(chunk.sizes) * dtype.itemsize:
            raise ValueError(f"{key} has an impossible size")
        place = (stored.relative_path, int(stored.offset), 0, int(stored.length))
        result.append(ArchivedChunk(tuple(chunk.offsets), tuple(chunk.sizes), dtype, *place))
    return result
