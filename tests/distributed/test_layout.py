"""The grid of ranks against its laws and megatron-core's own generator of groups."""

from __future__ import annotations

import itertools
import math

import pytest

from megalite.config.schema import LayoutConfig
from megalite.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout

LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=4, dp=2),
    Layout(tp=2, cp=2, dp=3, pp=2),
    Layout(tp=4, dp=4, pp=2, ep=8),
    Layout(tp=2, cp=2, dp=4, pp=2, ep=4, etp=2),
    Layout(tp=1, cp=3, dp=2, ep=6),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_both_factorisations_multiply_to_the_world_size(layout: Layout) -> None:
    assert layout.world_size == layout.pp * layout.dp * layout.cp * layout.tp
    assert layout.world_size == layout.pp * layout.edp * layout.ep * layout.etp


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_groups_along_any_axes_hold_the_ranks_that_are_alike_along_the_others(layout: Layout) -> None:
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for family in (DENSE_AXES, EXPERT_AXES):
        for axes in itertools.chain.from_iterable(itertools.combinations(family, n) for n in range(1, 5)):
            groups = layout.groups(*axes)
            assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
            assert {len(group) for group in groups} == {math.prod(layout.size(axis) for axis in axes)}
            for group in groups:
                assert list(group) == sorted(group)
                assert len({tuple(at[rank][axis] for axis in family if axis not in axes) for rank in group}) == 1
                assert {layout.group_of(rank, *axes) for rank in group} == {group}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_at_is_the_inverse_of_coordinates(layout: Layout) -> None:
    for rank in range(layout.world_size):
        here = layout.coordinates(rank)
        assert layout.rank_at(**{axis: here[axis] for axis in DENSE_AXES}) == rank
        assert all(0 <= here[axis] < layout.size(axis) for axis in here)


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    steps = [layout.rank_at(**{axis: 1}) for axis in ("tp", "cp", "dp", "pp")]
    assert steps == [1, 2, 4, 8]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_equal_those_of_megatron_core(layout: Layout) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
    cases = [
        (dense, names) for names in (["tp"], ["cp"], ["dp"], ["pp"], ["dp", "cp"], ["tp", "pp"], ["tp", "dp", "cp"])
    ]
    cases += [(expert, names) for names in (["ep"], ["dp"], ["tp"], ["tp", "ep"], ["ep", "dp"])]
    for generator, names in cases:
        rename = {"dp": "edp", "tp": "etp"} if generator is expert else {}
        ours = layout.groups(*(rename.get(name, name) for name in names))
        theirs = generator.get_ranks("-".join(names))
        assert sorted(ours) == sorted(tuple(sorted(group)) for group in theirs), names


def test_the_data_parallel_size_is_what_the_other_axes_leave() -> None:
    config = LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2)
    layout = Layout.from_config(config, 24)
    assert (layout.tp, layout.pp, layout.cp, layout.dp) == (2, 2, 2, 3)
