"""What a checkpoint holds: its logical tensors, and which rectangle of each lies where.

Key idea: a run writes rectangles, whole rows of them in blocks of a few megabytes with a checksum each. So a reader
takes from a large tensor the blocks that it needs, and still knows that every byte is what was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from megalite.distributed.param_spec import Shape


class TensorInfo(NamedTuple):
    """A stored logical tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a stored tensor: row-major from byte `offset` of `file`, with the CRC-32 of these bytes."""

    start: Shape
    sizes: Shape
    dtype: torch.dtype
    file: str
    offset: int
    checksum: int

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Bytes that the file must have at least."""
        return self.offset + self.nbytes

    def find(self, file: BinaryIO) -> tuple[int, int]:
        """Where its bytes begin, and their checksum."""
        return self.offset, self.checksum


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
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.stop)
        return sizes


def check_place(key: str, file: object, offset: object) -> None:
    """Raise a ValueError where a tensor would lie outside the folder, or before a file's beginning."""
    if not isinstance(file, str) or file != Path(file).name:
        raise ValueError(f"{key} lies outside the folder, in {file}")
    if type(offset) is not int or offset < 0:
        raise ValueError(f"{key} lies at an impossible place, {offset}")
