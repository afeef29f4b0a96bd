"""Places of parameters, as data: every kind of cut covers the logical tensor once, and says who holds copies."""

from __future__ import annotations

import pytest

from megalite.distributed.layout import Layout
from megalite.distributed.param_spec import ParamSpec, Place, cut, grouped_qkv, replicated, vocabulary_rows
from tests.helpers import assert_tiled

HIDDEN = 6


def qkv_specs(tp: int, groups: int, queries: int) -> list[tuple[int, ParamSpec]]:
    """The fused projection with head width 5 on every rank of one stage."""
    shape = (groups, queries + 2, 5, HIDDEN)
    local_groups = max(1, groups // tp)
    local = (local_groups, groups * queries // tp // local_groups + 2, 5, HIDDEN)
    places = [Place(Layout(tp=tp), rank) for rank in range(tp)]
    return [(p.rank, ParamSpec(shape, local, grouped_qkv(groups, queries, shape[2:], p))) for p in places]


def row_specs(layout: Layout, padded: int, stages: tuple[int, ...] | None = None) -> list[tuple[int, ParamSpec]]:
    """A table of 131 rows on every rank of one replica that holds a part of it."""
    specs = []
    for rank in layout.group_of(0, "pp", "tp"):
        if layout.coordinates(rank)["pp"] in (stages or (0,)):
            boxes = vocabulary_rows((131, HIDDEN), padded, Place(layout, rank, stages))
            specs.append((rank, ParamSpec((131, HIDDEN), (padded // layout.tp, HIDDEN), boxes)))
    return specs


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("padded", [136, 256])
def test_a_padded_vocabulary_is_covered_once_and_padding_is_in_no_box(tp: int, padded: int) -> None:
    specs = row_specs(Layout(tp=tp), padded)
    assert_tiled(specs)
    rows = padded // tp
    for rank, spec in specs:
        count = min(rows, max(0, 131 - rank * rows))
        assert [box.shape for box in spec.boxes] == ([(count, HIDDEN)] if count else [])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 4])
def test_an_even_cut_covers_the_tensor_once(tp: int, dim: int) -> None:
    shape = (8, 12)
    local = tuple(n // tp if i == dim else n for i, n in enumerate(shape))
    specs = [(r, ParamSpec(shape, local, cut(shape, dim, Place(Layout(tp=tp), r)))) for r in range(tp)]
    assert_tiled(specs)
    assert all(box.copies == (r,) and box.sum_over == () for r, spec in specs for box in spec.boxes)


@pytest.mark.parametrize(("tp", "groups"), [(1, 2), (2, 2), (4, 2), (8, 2), (8, 1), (2, 8)])
def test_grouped_projections_are_covered_once_whatever_tp_and_groups(tp: int, groups: int) -> None:
    """With more ranks than groups, keys and values are copies with partial gradients."""
    queries = 16 // groups
    specs = qkv_specs(tp, groups, queries)
    assert_tiled(specs)
    sharers = tp // groups
    for rank, spec in specs if sharers > 1 else ():
        query, key_value = spec.boxes
        first = rank // sharers * sharers
        assert (query.copies, query.sum_over) == ((rank,), ())
        assert key_value.copies == key_value.sum_over == tuple(range(first, first + sharers))
        assert key_value.owner == first
        assert key_value.global_start[:2] == (rank // sharers, queries)
        assert query.global_start[:2] == (rank // sharers, rank % sharers * queries // sharers)


def test_tied_tables_on_the_first_and_last_of_four_stages_are_copies_with_one_owner() -> None:
    specs = row_specs(Layout(tp=2, pp=4, dp=2), 136, stages=(0, 3))
    assert [rank for rank, _ in specs] == [0, 1, 12, 13]
    assert_tiled(specs)
    for rank, spec in specs:
        (box,) = spec.boxes
        assert box.copies == box.sum_over == (rank % 2, 12 + rank % 2)
        assert box.owner == rank % 2


def test_every_data_parallel_replica_names_its_own_ranks() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    (box,) = replicated((4,), Place(layout, layout.rank_at(dp=1, pp=1, tp=1)))
    assert box.copies == (layout.rank_at(dp=1, pp=1), layout.rank_at(dp=1, pp=1, tp=1))


@pytest.mark.parametrize("partial", [True, False])
def test_copies_over_tensor_parallel_ranks_are_summed_where_they_are_partial(partial: bool) -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    specs = [(r, ParamSpec((4,), (4,), replicated((4,), Place(layout, r), partial=partial))) for r in range(4)]
    assert_tiled(specs)
    for _, spec in specs:
        (box,) = spec.boxes
        assert (box.copies, box.owner, box.sum_over) == ((0, 1, 2, 3), 0, (0, 1, 2, 3) if partial else ())
