"""The part of a parameter that a rank holds, as rectangles of the logical tensor.

Key idea: sharding cuts flat buffers, so what a rank holds of a parameter (or its gradient, or a moment) is one range of
its local tensor, row by row. Such a range is a few rectangles (a part of a row, whole rows, a part of a row, at each
depth); cut with the boxes of the spec they are rectangles of the logical tensor. The norm, the sums over copies,
initialisation, dumps and checkpoints all work on those.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from torch import Tensor

from megalite.distributed.param_spec import Box, ParamSpec, Shape


class Held(NamedTuple):
    """A rectangle of the logical tensor: which box it is part of, where it begins, and its elements."""

    box: Box
    global_start: Shape
    view: Tensor


class Piece(NamedTuple):
    """Elements `start`, `start + 1`, ... of the parameter `name`'s flattened local tensor, as a 1-D tensor.

    `sharded`: ranks at the same place of other replicas hold other elements; else they hold the same.
    """

    name: str
    flat: Tensor
    start: int
    spec: ParamSpec
    sharded: bool = False

    def held(self) -> Iterator[Held]:
        """The rectangles of the logical tensor in this piece, as views. Padding is in none of them."""
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
                    yield Held(box, tuple(to + low - a for to, (low, _), a in moved), view[slices])


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
