"""The part of a parameter that a rank holds, as rectangles of the logical tensor.

Key idea: sharding cuts flat buffers, so what a rank holds of a parameter (or its gradient, or a moment) is one range of
its local tensor, row by row. Such a range is a few rectangles (a part of a row, whole rows, a part of a row, at each
depth); cut with the boxes of the spec they are rectangles of the logical tensor. The norm, the sums over copies,
initialisation, dumps and checkpoints all work on those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.collectives import gather_tensors
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Box, ParamSpec, Shape


class Code(NamedTuple):
    """How elements stand for numbers of `dtype`, which `decode` gives."""

    dtype: torch.dtype
    decode: Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """Elements `start`, `start + 1`, ... of the parameter `name`'s flattened local tensor, as a 1-D tensor.

    `sharded`: data ranks hold different elements; else each holds all of these. `code`: None where the elements are the
    numbers themselves.
    """

    name: str
    flat: Tensor
    start: int
    spec: ParamSpec
    sharded: bool = False
    code: Code | None = None

    def numbers(self, view: Tensor) -> Tensor:
        """What a view of the elements stands for."""
        return view.detach() if self.code is None else self.code.decode(view)

    def held(self) -> Iterator[tuple[Box, Shape, Tensor]]:
        """The rectangles of the logical tensor in this piece: which box each is part of, where in the logical tensor it
        begins, and a view of its elements. Padding is in none of them."""
        stop = self.start + self.flat.numel()
        offset = 0
        for start, shape in rectangles(self.spec.local_shape, self.start, stop):
            view = self.flat[offset : offset + prod(shape)].view(shape)
            offset += prod(shape)
            for box in self.spec.boxes:
                ranges = [
                    (max(a, b), min(a + n, b + m))
                    for a, n, b, m in zip(start, shape, box.local_start, box.shape, strict=True)
                ]
                if all(low < high for low, high in ranges):
                    slices = tuple(slice(low - a, high - a) for (low, high), a in zip(ranges, start, strict=True))
                    moved = zip(box.global_start, ranges, box.local_start, strict=True)
                    yield box, tuple(to + low - a for to, (low, _), a in moved), view[slices]

    def runs(self) -> Iterator[tuple[Box, Tensor, int]]:
        """The parts of boxes in this piece as few 1-D views, each with its place in the flattened local tensor."""
        stop = self.start + self.flat.numel()
        for box in self.spec.boxes:
            for first, last in _runs(self.spec.local_shape, box):
                low, high = max(first, self.start), min(last, stop)
                if low < high:
                    yield box, self.flat[low - self.start : high - self.start], low


def _runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the contiguous runs of a box in a row-major tensor of `shape`."""
    whole_from = len(shape)  # dimensions from here on are all in the box
    while whole_from and box.shape[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    outer = max(0, whole_from - 1)  # runs are rows along this dimension
    length = prod(box.shape[outer:])
    for index in itertools.product(
        *(range(a, a + n) for a, n in zip(box.local_start[:outer], box.shape, strict=False))
    ):
        place = (*index, *box.local_start[outer:])
        first = sum(i * prod(shape[d + 1 :]) for d, i in enumerate(place))
        yield first, first + length


def is_counted_here(piece: Piece, box: Box, mesh: Mesh) -> bool:
    """Whether this rank, and no other, counts what `piece` has of a box (in the norm, in dumps): as the box's owner,
    and where all data ranks hold the same, as the first of them."""
    return box.owner == mesh.rank and (piece.sharded or mesh.along(piece.spec.domain.data_axes).rank == 0)


def gather(pieces: Iterable[Piece], mesh: Mesh) -> dict[str, Tensor]:
    """Whole logical tensors on the CPU of the first rank, by global name, from the pieces that ranks hold; nothing on
    the others. Collective over the world."""
    mine = [
        ((piece.name, piece.spec.shape, start), piece.numbers(view))
        for piece in pieces
        for box, start, view in piece.held()
        if is_counted_here(piece, box, mesh)
    ]
    result: dict[str, Tensor] = {}
    for (name, shape, start), part in gather_tensors(mine, mesh.world, mesh.device):
        tensor = result.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        tensor[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part.cpu()
    return result


def whole(name: str, tensor: Tensor, spec: ParamSpec) -> Piece:
    """A piece that is all of a contiguous local tensor."""
    assert tuple(tensor.shape) == spec.local_shape, f"{name}: {tuple(tensor.shape)} is not {spec.local_shape}"
    return Piece(name, tensor.detach().view(-1), 0, spec)


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """The elements from `start` to `stop` of a row-major tensor of `shape`, as (start, shape) of successive rectangles,
    each of which is contiguous."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        if within == 0 and stop - start >= row:  # whole rows
            count = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (count, *shape[1:])
            start += count * row
        else:
            end = min(stop, (index + 1) * row)
            for inner_start, inner_shape in rectangles(shape[1:], within, within + end - start):
                yield (index, *inner_start), (1, *inner_shape)
            start = end
