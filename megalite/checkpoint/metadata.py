"""The index of a checkpoint: which tensors it holds, which file holds which rectangle of each.

Key idea: the format is that of torch.distributed.checkpoint (DCP), which keeps the index in `.metadata`, a pickle, and
a pickle can run any code. So it's read with an unpickler that knows the index's own classes and nothing else, and is
then checked against the files beside it: a shard that is missing or cut short is found before anything is loaded.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megalite.checkpoint.errors import CheckpointError, naming, reason
from megalite.distributed.param_spec import Shape

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


class TensorInfo(NamedTuple):
    """A stored logical tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a stored tensor: `length` bytes of `file` from `offset`, in DCP's encoding."""

    start: Shape
    sizes: Shape
    dtype: torch.dtype
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, by key: every logical tensor, and the stored chunks of each."""

    tensors: dict[str, TensorInfo]
    chunks: dict[str, list[StoredChunk]]

    @property
    def files(self) -> dict[str, int]:
        """Every data file with the size in bytes that it must at least have."""
        sizes: dict[str, int] = {}
        for chunks in self.chunks.values():
            for chunk in chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
        return sizes


def write_index(directory: Path, index: Index) -> None:
    """Write the index as DCP does. A `CheckpointError` where the chunks of a tensor aren't the whole of it."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, (shape, dtype) in index.tensors.items():
        chunks = index.chunks[key]
        held, starts = sum(prod(chunk.sizes) for chunk in chunks), {chunk.start for chunk in chunks}
        if held != prod(shape) or len(starts) != len(chunks):
            raise CheckpointError(f"{key}: {len(starts)} chunks hold {held} of {prod(shape)} elements")
        boxes = [ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.sizes)) for chunk in chunks]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), boxes)
        for chunk in chunks:
            places[MetadataIndex(key, chunk.start)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(tensors, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    (directory / INDEX_FILE).write_bytes(pickle.dumps(metadata))


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a checkpoint's index never does")


def read_index(directory: str | os.PathLike[str]) -> Index:
    """The index of the checkpoint in `directory`. Raises `CheckpointError` where it is missing, damaged or hostile."""
    path, index = Path(directory, INDEX_FILE), Index({}, {})
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        for key, entry in metadata.state_dict_metadata.items():
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
    result = []
    for chunk in tensor.chunks:
        stored = storage_data[MetadataIndex(key, chunk.offsets)]
        if Path(stored.relative_path).name != stored.relative_path:
            raise ValueError(f"{key} lies outside the folder, in {stored.relative_path}")
        if min(stored.offset, *chunk.offsets, *chunk.sizes) < 0 or stored.length < prod(chunk.sizes) * dtype.itemsize:
            raise ValueError(f"{key} has an impossible size")
        place = (stored.relative_path, int(stored.offset), int(stored.length))
        result.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), dtype, *place))
    return result


def check_files(directory: str | os.PathLike[str], files: dict[str, int]) -> None:
    """Raise `CheckpointError` where a data file is missing or shorter than `files` says."""
    for name, size in files.items():
        path = Path(directory, name)
        with naming(path):
            actual = path.stat().st_size
        if actual < size:
            raise CheckpointError(f"{path} is truncated: it has {actual} bytes and needs at least {size}")


def stored_tensors(directory: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a checkpoint, by key, from its index alone."""
    return dict(sorted(read_index(directory).tensors.items()))
