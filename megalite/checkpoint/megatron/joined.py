"""Logical tensors that are cut into rectangles, each read from somewhere else.

Key idea: a tensor-parallel rank's tensor is a rectangle of the logical one, or with a gated MLP two: a part of the gate
and a part of the up projection. Once all rectangles are placed, a reader knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.distributed.param_spec import Shape

Slices = tuple[slice, ...]


class Source(NamedTuple):
    """A tensor somewhere; `read` gives a part of it, on the CPU."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Slices], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """A tensor at hand."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.detach().__getitem__)


class Placed(NamedTuple):
    """The rectangle of `size` that begins at `begin` in the source and at `start` in the logical tensor."""

    source: Source
    begin: Shape
    start: Shape
    size: Shape


class Joined:
    """A logical tensor of rectangles. A `CheckpointError` names it where they aren't of one number format or don't make
    up the whole."""

    def __init__(self, name: str, parts: Sequence[Placed]):
        self.name, self.parts = name, tuple(parts)
        ends = [[a + n for a, n in zip(one.start, one.size, strict=True)] for one in parts]
        self.shape = tuple(map(max, zip(*ends, strict=True)))
        formats = {one.source.dtype for one in parts}
        if len(formats) > 1:
            raise CheckpointError(f"{name} has parts of several number formats: {', '.join(sorted(map(str, formats)))}")
        (self.dtype,) = formats
        if sum(prod(one.size) for one in parts) != prod(self.shape):
            raise CheckpointError(f"{name}: its parts are not a whole tensor")

    def read(self, rows: int | None = None) -> Tensor:
        """The tensor, or its first `rows`, in the stored number format."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        result = torch.empty(shape, dtype=self.dtype)
        for source, begin, start, size in self.parts:
            kept = [min(a + n, total) - a for a, n, total in zip(start, size, shape, strict=True)]
            if min(kept, default=1) > 0:
                here = tuple(slice(a, a + n) for a, n in zip(start, kept, strict=True))
                result[here] = source.read(tuple(slice(a, a + n) for a, n in zip(begin, kept, strict=True)))
        return result


def one(name: str, source: Source) -> Joined:
    """A tensor that one source is."""
    zeros = (0,) * len(source.shape)
    return Joined(name, [Placed(source, zeros, zeros, source.shape)])


def join(name: str, sources: Sequence[Source], dim: int, *, gated: bool = False) -> Joined:
    """The sources one after another along `dim`. `gated`: first the first half of each, then the second of each."""
    parts, place, halves = [], 0, 2 if gated else 1
    ranks = {len(source.shape) for source in sources}
    if len(ranks) > 1 or dim >= min(ranks):
        raise CheckpointError(f"{name} has another number of dimensions on each rank, or too few")
    for half in range(halves):
        for source in sources:
            length = source.shape[dim] // halves
            parts.append(
                Placed(source, _at(source, dim, half * length), _at(source, dim, place), _cut(source, dim, length))
            )
            place += length
    return Joined(name, parts)


def _at(source: Source, dim: int, place: int) -> Shape:
    return tuple(place if i == dim else 0 for i in range(len(source.shape)))


def _cut(source: Source, dim: int, length: int) -> Shape:
    return tuple(length if i == dim else n for i, n in enumerate(source.shape))
