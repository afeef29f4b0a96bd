"""Places of parameters, as data: every kind of cut covers the logical tensor once, and a broken spec is found out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megalite.distributed.layout import Layout
from megalite.distributed.param_spec import (
    Box,
    ParamSpec,
    Place,
    Shape,
    check_tiling,
    cut,
    grouped_qkv,
    replicated,
    vocabulary_rows,
)

HIDDEN = 6


def qkv_specs(layout: Layout, groups: int, queries: int) -> list[tuple[int, ParamSpec]]:
    """The fused projection with head width 5 on every rank of one stage."""
    shape = (groups, queries + 2, 5, HIDDEN)
    mine = groups * queries // layout.tp
    local_groups = max(1, groups // layout.tp)
    local = (local_groups, mine // local_groups + 2, 5, HIDDEN)
    places = [Place(layout, rank) for rank in range(layout.tp)]
    return [(p.rank, ParamSpec(shape, local, grouped_qkv(groups, queries, shape[2:], p))) for p in places]


def row_specs(layout: Layout, padded: int, stages: tuple[int, ...] | None = None) -> list[tuple[int, ParamSpec]]:
    """A table of 131 rows on every rank of one replica that holds a part of it."""
    shape: Shape = (131, HIDDEN)
    specs = []
    for rank in layout.group_of(0, "pp", "tp"):
        if layout.coordinates(rank)["pp"] in (stages or (0,)):
            boxes = vocabulary_rows(shape, padded, Place(layout, rank, stages))
            specs.append((rank, ParamSpec(shape, (padded // layout.tp, HIDDEN), boxes)))
    return specs


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("padded", [136, 256])
def test_a_padded_vocabulary_is_covered_once_and_padding_is_in_no_box(tp: int, padded: int) -> None:
    specs = row_specs(Layout(tp=tp), padded)
    assert check_tiling("table", specs) == []
    held = [sum(box.shape[0] for box in spec.boxes) for _, spec in specs]
    rows = padded // tp
    assert held == [min(rows, max(0, 131 - rank * rows)) for rank in range(tp)]


def test_a_rank_that_holds_only_padding_has_no_box() -> None:
    specs = row_specs(Layout(tp=4), 256)
    assert specs[3][1].boxes == ()
    assert specs[3][1].local_shape == (64, HIDDEN)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_even_cut_covers_the_tensor_once(tp: int, dim: int) -> None:
    shape = (8, 12)
    local = tuple(n // tp if i == dim else n for i, n in enumerate(shape))
    layout = Layout(tp=tp)
    specs = [(r, ParamSpec(shape, local, cut(shape, dim, Place(layout, r)))) for r in range(tp)]
    assert check_tiling("weight", specs) == []
    assert all(box.copies == (r,) and box.sum_over == () for r, spec in specs for box in spec.boxes)


@pytest.mark.parametrize(("tp", "groups"), [(1, 2), (2, 2), (4, 2), (8, 2), (8, 1), (4, 4), (2, 8)])
def test_grouped_projections_are_covered_once_whatever_tp_and_groups(tp: int, groups: int) -> None:
    specs = qkv_specs(Layout(tp=tp), groups, queries=16 // groups)
    assert check_tiling("qkv", specs) == []


@pytest.mark.parametrize(("tp", "sharers"), [(4, 2), (8, 4)])
def test_with_more_ranks_than_groups_keys_and_values_are_copies_with_partial_gradients(tp: int, sharers: int) -> None:
    for rank, spec in qkv_specs(Layout(tp=tp), groups=2, queries=8):
        queries, key_value = spec.boxes
        first = rank // sharers * sharers
        assert queries.copies == (rank,)
        assert queries.sum_over == ()
        assert key_value.copies == key_value.sum_over == tuple(range(first, first + sharers))
        assert key_value.owner == first
        assert key_value.global_start[:2] == (rank // sharers, 8)
        assert queries.global_start[:2] == (rank // sharers, rank % sharers * 8 // sharers)


def test_tied_tables_on_the_first_and_last_of_four_stages_are_copies_with_one_owner() -> None:
    layout = Layout(tp=2, pp=4, dp=2)
    specs = row_specs(layout, 136, stages=(0, 3))
    assert [rank for rank, _ in specs] == [0, 1, 12, 13]
    assert check_tiling("table", specs) == []
    by_rank = dict(specs)
    for tp in (0, 1):
        for rank in (tp, 12 + tp):
            (box,) = by_rank[rank].boxes
            assert box.copies == box.sum_over == (tp, 12 + tp)
            assert box.owner == tp


def test_every_data_parallel_replica_names_its_own_ranks() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    (box,) = replicated((4,), Place(layout, layout.rank_at(dp=1, pp=1, tp=1)))
    assert box.copies == (layout.rank_at(dp=1, pp=1), layout.rank_at(dp=1, pp=1, tp=1))


def test_sequence_parallel_norms_are_copies_whose_gradients_are_summed() -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    for partial in (True, False):
        specs = [(r, ParamSpec((4,), (4,), replicated((4,), Place(layout, r), partial=partial))) for r in range(4)]
        assert check_tiling("norm", specs) == []
        for _, spec in specs:
            (box,) = spec.boxes
            assert (box.copies, box.owner, box.sum_over) == ((0, 1, 2, 3), 0, (0, 1, 2, 3) if partial else ())


def _changed(specs: list[tuple[int, ParamSpec]], rank: int, **changes: object) -> list[tuple[int, ParamSpec]]:
    """`specs` with the first box of one rank changed."""
    result = []
    for at, spec in specs:
        boxes: tuple[Box, ...] = spec.boxes
        if at == rank:
            boxes = (replace(boxes[0], **changes), *boxes[1:])  # type: ignore[arg-type]
        result.append((at, replace(spec, boxes=boxes)))
    return result


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"shape": (33, HIDDEN)}, "780 of 786 elements"),
        ({"global_start": (35, 0)}, "overlap"),
        ({"global_start": (0, 0)}, "overlap"),
        ({"owner": 0}, "names copies"),
        ({"copies": (0, 1)}, "names copies"),
        ({"global_start": (131, 0)}, "outside"),
        ({"local_start": (1, 0)}, "outside"),
    ],
)
def test_a_broken_spec_is_reported(changes: dict[str, object], complaint: str) -> None:
    sound = row_specs(Layout(tp=4), 136)
    assert check_tiling("table", sound) == []
    problems = check_tiling("table", _changed(sound, 1, **changes))
    assert any(re.search(complaint, problem) for problem in problems), problems


def test_a_tensor_that_nobody_owns_is_reported() -> None:
    layout = Layout(tp=2)
    specs = [(r, ParamSpec((4,), (4,), replicated((4,), Place(layout, r)))) for r in range(2)]
    swapped = _changed(_changed(specs, 0, owner=1), 1, owner=0)
    assert any("0 of 4 elements" in problem for problem in check_tiling("norm", swapped))
