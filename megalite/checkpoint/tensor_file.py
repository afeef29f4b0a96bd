"""Safetensors files (https://huggingface.co/docs/safetensors), written as a stream.

Key idea: such a file is a header of names, formats and places, then the bytes; the header is known before the first
tensor is. So one tensor at a time is in memory; the library's own writer wants them all at once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.distributed.param_spec import Shape

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The file's name of every number format that it may hold."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 16 << 20
"""Bytes of a tensor's rows that have one checksum, unless one row is longer."""
_ALIGNMENT = 8  # bytes that the header's length is a multiple of, as the format asks


class Entry(NamedTuple):
    """A tensor to write: `read` gives it when its turn comes, on any device."""

    name: str
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Block(NamedTuple):
    """Some whole rows of an entry: the rectangle, its first byte in the file, and the CRC-32 of its bytes."""

    start: Shape
    sizes: Shape
    offset: int
    checksum: int


def blocks_of(shape: Shape, itemsize: int, block: int = BLOCK) -> Iterator[tuple[Shape, Shape]]:
    """(start, sizes) of successive rectangles of at most `block` bytes, each one run of a row-major tensor."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:]) * itemsize
    if row > block and len(shape) > 1:
        for index in range(shape[0]):
            for start, sizes in blocks_of(shape[1:], itemsize, block):
                yield (index, *start), (1, *sizes)
        return
    step = max(1, block // row) if row else max(1, shape[0])
    for first in range(0, shape[0], step):
        yield (first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:])


def write_safetensors(
    stream: BinaryIO, entries: Sequence[Entry], metadata: Mapping[str, str]
) -> list[tuple[Entry, list[Block]]]:
    """Write a whole file, with one of `entries` in memory at a time; where each of them is.

    Wide formats come first, so that every tensor lies at a multiple of its format's size. A `CheckpointError` for a
    number format that such a file can't hold.
    """
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.name} is of {entry.dtype}, which a .safetensors file can't hold")
        end = begin + entry.nbytes
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    offset, written = 8 + len(text), []
    for entry in entries:
        written.append((entry, list(_write_tensor(stream, entry, offset))))
        offset += entry.nbytes
    return written


def _write_tensor(stream: BinaryIO, entry: Entry, offset: int) -> Iterator[Block]:
    tensor = entry.read().cpu().contiguous()
    assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
    data, done = tensor.reshape(-1).view(torch.uint8).numpy().data, 0
    for start, sizes in blocks_of(entry.shape, entry.dtype.itemsize):
        block = data[done : done + prod(sizes) * entry.dtype.itemsize]
        stream.write(block)
        yield Block(start, sizes, offset + done, zlib.crc32(block))
        done += len(block)
