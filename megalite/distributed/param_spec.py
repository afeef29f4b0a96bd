"""A parameter knows its place.

Key idea: for each parameter a module keeps one record that says which parts of the logical tensor (no padding, no cut)
this rank holds, who else holds them, and who owns them. Initialisation, gradient synchronisation, the gradient norm,
checkpoints and conversion all read this record; nobody derives it again. The functions below make the records of
every kind of cut from a layout and a rank, as plain data. A spec's global name is its path in the model, which
uses global layer numbers; parameters with equal names are copies of one logical parameter (tied embeddings).

Local tensors may hold rows that no box covers (vocabulary padding): those are not part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.distributed.layout import DENSE, Domain, Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `normal` with mean 0 and deviation `std`, `uniform` between -`value` and `value`, or a
    `constant` `value`."""

    kind: str = "normal"
    std: float = 0.02
    value: float = 0.0


ZEROS = Init("constant", value=0.0)
ONES = Init("constant", value=1.0)


@dataclass(frozen=True)
class Box:
    """A rectangle of the logical tensor that this rank holds.

    `copies`: ranks of this replica (see the parameter's `Domain`) that hold the same rectangle. `owner`: the one of
    them that counts in the norm and writes the checkpoint. `sum_over`: ranks whose gradients must be summed for the
    true gradient (each holds a part of it); empty where every copy already has the true one.
    """

    global_start: Shape
    local_start: Shape
    shape: Shape
    copies: tuple[int, ...]
    owner: int
    sum_over: tuple[int, ...] = ()

    @property
    def global_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.global_start, self.shape, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True)
class Treatment:
    """How the optimizer treats a parameter. `decays`: with weight decay. `lr_group`: `default`, or `decoupled`, whose
    learning rate is --decoupled-lr."""

    decays: bool = True
    lr_group: str = "default"

    @property
    def order(self) -> tuple[bool, str]:
        """Parameters lie in a bucket in this order: equal where nothing differs."""
        return not self.decays, self.lr_group


NO_DECAY = Treatment(decays=False)
DECOUPLED = Treatment(lr_group="decoupled")


@dataclass(frozen=True)
class ParamSpec:
    """The place and treatment of one parameter on one rank. `stages`: those that hold copies of it, where they are not
    its own stage alone. `domain`: over which ranks it is copied. `keeps_dtype`: it isn't rounded in checkpoints."""

    shape: Shape  # logical
    local_shape: Shape  # of the tensor on this rank, padding included
    boxes: tuple[Box, ...]
    init: Init = Init()
    treatment: Treatment = Treatment()
    stages: tuple[int, ...] = ()
    domain: Domain = DENSE
    keeps_dtype: bool = False


class Place(NamedTuple):
    """A rank in a layout, and the pipeline stages that hold copies of what is being placed (None: its own stage)."""

    layout: Layout
    rank: int
    stages: tuple[int, ...] | None = None
    domain: Domain = DENSE

    @property
    def tp(self) -> int:
        return self.layout.size(self.domain.tensor_axis)

    @property
    def tp_rank(self) -> int:
        return self.layout.coordinates(self.rank)[self.domain.tensor_axis]

    def ranks_with_copy(self, tp_ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks of this replica at these tensor-parallel indices, on every stage that holds a copy."""
        stages = self.stages or (self.layout.coordinates(self.rank)["pp"],)
        at = {
            rank: self.layout.coordinates(rank)
            for rank in self.layout.group_of(self.rank, "pp", self.domain.tensor_axis)
        }
        return tuple(rank for rank, c in at.items() if c["pp"] in stages and c[self.domain.tensor_axis] in tp_ranks)


def _box(
    place: Place, global_start: Shape, local_start: Shape, shape: Shape, tp_ranks: Sequence[int], partial: bool
) -> Box:
    """A box held at `tp_ranks` on each of the place's stages. Stage copies always hold partial gradients; copies over
    tensor-parallel ranks only where `partial`."""
    copies = place.ranks_with_copy(tp_ranks)
    summed = place.ranks_with_copy(tp_ranks if partial else (place.tp_rank,))
    return Box(global_start, local_start, shape, copies, copies[0], summed if len(summed) > 1 else ())


def replicated(shape: Shape, place: Place, *, partial: bool = False) -> tuple[Box, ...]:
    """Whole on every tensor-parallel rank; `partial` where each sees only part of the tokens (sequence parallel)."""
    return (_box(place, (0,) * len(shape), (0,) * len(shape), shape, range(place.tp), partial),)


def cut(shape: Shape, dim: int, place: Place) -> tuple[Box, ...]:
    """Cut evenly along `dim` over the tensor-parallel ranks."""
    assert shape[dim] % place.tp == 0, f"{place.tp} ranks do not divide dimension {dim} of {shape}"
    length = shape[dim] // place.tp
    start = tuple(place.tp_rank * length if i == dim else 0 for i in range(len(shape)))
    local = tuple(length if i == dim else n for i, n in enumerate(shape))
    return (_box(place, start, (0,) * len(shape), local, (place.tp_rank,), False),)


def cut_experts(shape: Shape, dim: int | None, place: Place) -> tuple[Box, ...]:
    """Of a tensor [experts, ...] in the experts' domain: experts cut evenly over the expert-parallel ranks, and `dim`
    over the tensor-parallel ones; None: each of these has all of it, and a part of its gradient."""
    count, whole = shape[0] // place.layout.ep, dim is None
    start, local = [0] * len(shape), list(shape)
    start[0], local[0] = place.layout.coordinates(place.rank)["ep"] * count, count
    if dim is not None:
        local[dim] //= place.tp
        start[dim] = place.tp_rank * local[dim]
    holders = range(place.tp) if whole else (place.tp_rank,)
    return (_box(place, tuple(start), (0,) * len(shape), tuple(local), holders, whole),)


def vocabulary_rows(shape: Shape, padded_rows: int, place: Place) -> tuple[Box, ...]:
    """Rows cut over tensor-parallel ranks after padding to `padded_rows`; padding is in no box, and a rank that holds
    nothing else has none."""
    rows = padded_rows // place.tp
    start = place.tp_rank * rows
    count = min(max(shape[0] - start, 0), rows)
    if count == 0:
        return ()
    rest = shape[1:]
    zeros = (0,) * len(rest)
    return (_box(place, (start, *zeros), (0, *zeros), (count, *rest), (place.tp_rank,), False),)


def grouped_qkv(groups: int, queries: int, tail: Shape, place: Place) -> tuple[Box, ...]:
    """The fused projection `[groups, queries + 2, *tail]` (queries of a group, then its key, then its value).

    With up to `groups` ranks, whole groups are cut. With more, the `tp / groups` ranks of a group share out its
    queries and each holds a copy of its key and value, whose gradients are partial.
    """
    tp, index = place.tp, place.tp_rank
    zeros = (0,) * len(tail)
    if tp <= groups:
        return cut((groups, queries + 2, *tail), 0, place)
    share = tp // groups
    group, part = divmod(index, share)
    mine = queries // share
    query_box = _box(place, (group, part * mine, *zeros), (0, 0, *zeros), (1, mine, *tail), (index,), False)
    sharers = range(group * share, (group + 1) * share)
    key_value = _box(place, (group, queries, *zeros), (0, mine, *zeros), (1, 2, *tail), sharers, True)
    return (query_box, key_value)
