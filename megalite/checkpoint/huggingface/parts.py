"""How a tensor of a Hugging Face file lies in a logical parameter of megalite.

Key idea: every difference of layout (queries, keys and values apart or fused, gate and up apart or fused, [in, out]
instead of [out, in]) is a view and a permutation of a stored tensor, put at some place of the logical one. So one small
record says it all, and reading a box, writing a tensor back and counting bytes all follow from that record.

A rule makes the records of one parameter from its logical shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megalite.distributed.param_spec import Shape

Range = tuple[int, int]
ReadSlices = Callable[[tuple[slice, ...]], Tensor]


@dataclass(frozen=True)
class Part:
    """The stored tensor `name`, viewed with each dimension split into its `factors` and permuted by `order`, is the
    rectangle of the logical parameter that begins at `start`."""

    name: str
    factors: tuple[Shape, ...]
    order: tuple[int, ...]
    start: Shape

    @property
    def shape(self) -> Shape:
        """Of the stored tensor."""
        return tuple(prod(sizes) for sizes in self.factors)

    @property
    def size(self) -> Shape:
        """Of the rectangle in the logical parameter."""
        flat = list(itertools.chain.from_iterable(self.factors))
        return tuple(flat[i] for i in self.order)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The rectangle in the logical parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def overlap(self, box: Sequence[slice]) -> tuple[Range, ...] | None:
        """What this part holds of a global `box`, in logical coordinates; None where that is nothing."""
        ranges = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, self.slices, strict=True)]
        return tuple(ranges) if all(low < high for low, high in ranges) else None

    def read(self, wanted: Sequence[Range], read: ReadSlices) -> Tensor:
        """The logical rectangle `wanted`, which lies in this part. `read` gives slices of the stored tensor; only what
        is wanted is read."""
        ranges = [(0, 0)] * len(wanted)
        for place, start, (low, high) in zip(self.order, self.start, wanted, strict=True):
            ranges[place] = (low - start, high - start)
        runs, first = [], 0
        for sizes in self.factors:
            runs.append(_runs(sizes, ranges[first : first + len(sizes)]))
            first += len(sizes)
        stored = _gather(read, runs, ())
        return stored.reshape([high - low for low, high in ranges]).permute(self.order)

    def read_all(self, read: ReadSlices) -> Tensor:
        """All of the part."""
        return self.read([(one.start, one.stop) for one in self.slices], read)

    def extract(self, logical: Tensor) -> Tensor:
        """The stored tensor, from the whole logical parameter."""
        inverse = [self.order.index(i) for i in range(len(self.order))]
        return logical[self.slices].permute(inverse).reshape(self.shape).contiguous()


def _runs(sizes: Shape, ranges: Sequence[Range]) -> list[Range]:
    """The contiguous stretches that the box `ranges` is in a row-major dimension with the factors `sizes`."""
    cut = len(sizes) - 1
    while cut > 0 and ranges[cut] == (0, sizes[cut]):
        cut -= 1
    tail = prod(sizes[cut + 1 :])
    low, high = ranges[cut]
    runs = []
    for outer in itertools.product(*(range(*r) for r in ranges[:cut])):
        index = 0
        for i, size in zip(outer, sizes[:cut], strict=True):
            index = index * size + i
        runs.append(((index * sizes[cut] + low) * tail, (index * sizes[cut] + high) * tail))
    return runs


def _gather(read: ReadSlices, runs: Sequence[Sequence[Range]], chosen: tuple[slice, ...]) -> Tensor:
    """The stored tensor's elements at the product of each dimension's runs."""
    dim = len(chosen)
    if dim == len(runs):
        return read(chosen)
    pieces = [_gather(read, runs, (*chosen, slice(*run))) for run in runs[dim]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


Rule = Callable[[Shape], tuple[Part, ...]]


def _plain(name: str, factors: tuple[Shape, ...], start: Shape | None = None) -> Part:
    axes = sum(len(sizes) for sizes in factors)
    return Part(name, factors, tuple(range(axes)), start or (0,) * axes)


def _whole(shape: Sequence[int]) -> tuple[Shape, ...]:
    return tuple((size,) for size in shape)


def same(name: str) -> Rule:
    """Stored as it is."""
    return lambda shape: (_plain(name, _whole(shape)),)


def transposed(name: str) -> Rule:
    """[out, in], stored as [in, out]."""
    return lambda shape: (Part(name, _whole(shape[::-1]), (1, 0), (0, 0)),)


def split_qkv(pattern: str) -> Rule:
    """[groups, queries + 2, head, ...], stored as three tensors of [groups x ... x head, ...]; `{x}` in the pattern is
    q, k or v."""

    def rule(shape: Shape) -> tuple[Part, ...]:
        groups, slots, width, *rest = shape
        zeros = (0,) * (len(rest) + 1)

        def one(letter: str, first: int, count: int) -> Part:
            return _plain(pattern.replace("{x}", letter), ((groups, count, width), *_whole(rest)), (0, first, *zeros))

        return one("q", 0, slots - 2), one("k", slots - 2, 1), one("v", slots - 1, 1)

    return rule


def stacked_qkv_transposed(name: str) -> Rule:
    """[heads, 3, head, in] or [heads, 3, head], stored as [in, 3 x heads x head] or [3 x heads x head]: all queries,
    all keys, all values."""

    def rule(shape: Shape) -> tuple[Part, ...]:
        heads, slots, width, *inputs = shape
        factors = (*_whole(inputs), (slots, heads, width))
        first = len(inputs)
        order = (first + 1, first, first + 2, *range(first))
        return (Part(name, factors, order, (0,) * len(shape)),)

    return rule


def gate_and_up(gate: str, up: str) -> Rule:
    """[2, inner, ...], stored as two tensors."""

    def rule(shape: Shape) -> tuple[Part, ...]:
        _, inner, *rest = shape
        zeros = (0,) * (len(rest) + 1)
        factors = ((1, inner), *_whole(rest))
        return _plain(gate, factors, (0, *zeros)), _plain(up, factors, (1, *zeros))

    return rule


def stacked(name: str) -> Rule:
    """[n, inner, ...], such as gate and up or a matrix for each head, stored as [n x inner, ...]."""
    return lambda shape: (_plain(name, ((shape[0], shape[1]), *_whole(shape[2:]))),)


def of_experts(name: str) -> Rule:
    """[experts, ...], stored as a tensor for each expert; `{e}` is its number."""

    def rule(shape: Shape) -> tuple[Part, ...]:
        zeros, factors = (0,) * (len(shape) - 1), ((1, shape[1]), *_whole(shape[2:]))
        return tuple(_plain(name.replace("{e}", str(e)), factors, (e, *zeros)) for e in range(shape[0]))

    return rule


def gates_and_ups(gate: str, up: str) -> Rule:
    """[experts, 2, inner, ...], stored as two tensors for each expert."""

    def rule(shape: Shape) -> tuple[Part, ...]:
        experts, _, inner, *rest = shape
        zeros, factors = (0,) * (len(rest) + 1), ((1, 1, inner), *_whole(rest))
        return tuple(
            _plain(name.replace("{e}", str(e)), factors, (e, half, *zeros))
            for e in range(experts)
            for half, name in enumerate((gate, up))
        )

    return rule


def halves_of_experts(name: str) -> Rule:
    """[experts, 2, inner, in], stored as [experts, 2 x inner, in]."""
    return lambda shape: (_plain(name, ((shape[0],), (shape[1], shape[2]), *_whole(shape[3:]))),)
