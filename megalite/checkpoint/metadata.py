"""The index of a checkpoint: which tensors it holds, which file holds which rectangle of each.

Key idea: torch.distributed.checkpoint (DCP) keeps the index in `.metadata`, which is a pickle, and a pickle can run any
code. So it's read with an unpickler that knows the index's own classes and nothing else, and is then checked against
the files beside it: a shard that is missing or cut short is found before anything is loaded.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megalite.checkpoint.errors import CheckpointError, reason
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


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a checkpoint's index never does")


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds: DCP's own metadata, and the stored chunks of each key in the same order."""

    metadata: dict[str, TensorStorageMetadata]
    chunks: dict[str, list[StoredChunk]]

    @property
    def files(self) -> dict[str, int]:
        """Every data file with the size in bytes that it must at least have."""
        sizes: dict[str, int] = {}
        for chunks in self.chunks.values():
            for chunk in chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
        return sizes

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every key."""
        return {key: TensorInfo(tuple(md.size), md.properties.dtype) for key, md in self.metadata.items()}


def read_index(directory: str | os.PathLike[str]) -> Index:
    """The index of the checkpoint in `directory`. Raises `CheckpointError` where it is missing, damaged or hostile."""
    path = Path(directory, INDEX_FILE)
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        tensors = {key: _tensor(key, entry) for key, entry in metadata.state_dict_metadata.items()}
        chunks = {key: _stored_chunks(key, tensor, metadata.storage_data) for key, tensor in tensors.items()}
    except Exception as error:  # damaged bytes can make an unpickler raise anything
        raise CheckpointError(f"{path} is not a checkpoint's index: {reason(error)}") from error
    return Index(tensors, chunks)


def _tensor(key: str, entry: Any) -> TensorStorageMetadata:
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{key} is not a tensor")
    return entry


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
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {reason(error)}") from error
        if actual < size:
            raise CheckpointError(f"{path} is truncated: it has {actual} bytes and needs at least {size}")


def describe(directory: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a checkpoint, by key, from its index alone."""
    return dict(sorted(read_index(directory).tensors().items()))
