"""The index of a checkpoint, as JSON: which tensors it holds, which file holds which rectangle of each.

Key idea: the tensors lie in safetensors files and the index is text, so nothing that is loaded can run. It is checked
against itself and against the files beside it: a file that is missing or cut short is found before anything is loaded.
Checkpoints of older versions, in the format of torch.distributed.checkpoint, are read too.
"""

from __future__ import annotations

import errno
import json
import os
from math import prod
from typing import Any

from megalite.checkpoint import torch_dist
from megalite.checkpoint.errors import CheckpointError, naming, reason
from megalite.checkpoint.stored import Index, StoredChunk, TensorInfo, check_place
from megalite.checkpoint.tensor_file import DTYPES, NAMES
from megalite.distributed.param_spec import Shape
from megalite.files.remote import Place, Remote, file_sizes, place

INDEX_FILE = "index.json"
_FORMAT = "megalite 2"


def write_index(directory: Place, index: Index) -> None:
    """Write the index. A `CheckpointError` where the chunks of a tensor aren't the whole of it."""
    tensors: dict[str, Any] = {}
    for key, (shape, dtype) in sorted(index.tensors.items()):
        chunks = index.chunks[key]
        held, starts = sum(prod(chunk.sizes) for chunk in chunks), {chunk.start for chunk in chunks}
        if held != prod(shape) or len(starts) != len(chunks):
            raise CheckpointError(f"{key}: {len(starts)} chunks hold {held} of {prod(shape)} elements")
        places = [[chunk.start, chunk.sizes, chunk.file, chunk.offset, chunk.checksum] for chunk in chunks]
        tensors[key] = {"dtype": NAMES[dtype], "shape": shape, "chunks": places}
    values = {"format": _FORMAT, "chunk": ["start", "shape", "file", "offset", "crc32"], "tensors": tensors}
    (directory / INDEX_FILE).write_text(json.dumps(values, indent=None), encoding="utf-8")


def read_index(directory: str | os.PathLike[str] | Remote) -> Index:
    """The index of the checkpoint in `directory`. Raises `CheckpointError` where it is missing, damaged or hostile."""
    folder = place(directory)
    path = folder / INDEX_FILE
    if not path.exists() and (folder / torch_dist.INDEX_FILE).exists():
        return torch_dist.read_index(folder)
    index = Index({}, {})
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {_FORMAT!r}")
        for key, entry in values["tensors"].items():
            info = index.tensors[key] = TensorInfo(_shape(entry["shape"]), DTYPES[entry["dtype"]])
            index.chunks[key] = [_chunk(key, info, *chunk) for chunk in entry["chunks"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's index: {reason(error)}") from error
    return index


def _shape(sizes: list[int]) -> Shape:
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes} is no shape")
    return tuple(sizes)


def _chunk(key: str, info: TensorInfo, start: list[int], sizes: list[int], *place: Any) -> StoredChunk:
    """A stored chunk. Raises where it contradicts the tensor that it is of."""
    file, offset, checksum = place
    check_place(key, file, offset)
    first, shape = _shape(start), _shape(sizes)
    if any(a + n > total for a, n, total in zip(first, shape, info.shape, strict=True)):
        raise ValueError(f"{key} has a chunk outside its shape")
    return StoredChunk(first, shape, info.dtype, file, offset, checksum)


def check_files(directory: str | os.PathLike[str] | Remote, files: dict[str, int]) -> None:
    """Raise `CheckpointError` where a data file is missing or shorter than `files` says."""
    folder = place(directory)
    with naming(folder):
        there = file_sizes(folder)
    for name, size in files.items():
        path = folder / name
        if name not in there:
            raise CheckpointError(f"{path}: {os.strerror(errno.ENOENT)}")
        if there[name] < size:
            raise CheckpointError(f"{path} is truncated: it has {there[name]} bytes and needs at least {size}")


def stored_tensors(directory: str | os.PathLike[str] | Remote) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a checkpoint, by key, from its index alone."""
    return dict(sorted(read_index(directory).tensors.items()))
