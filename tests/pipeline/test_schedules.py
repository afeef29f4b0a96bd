"""Schedules against lists worked out by hand and against megatron-core, and the laws that any schedule keeps."""

from __future__ import annotations

import pytest

from megalite.config.errors import UserError
from megalite.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in range(1, 13)]


def spelled(text: str) -> list[Action]:
    """`F0 B0` → actions of chunk 0; a dash before the number, `F-0`, means chunk 1."""
    kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
    return [Action(kinds[word[0]], int(word[1] == "-"), int(word.lstrip("FBIW-"))) for word in text.split()]


def every_schedule() -> list[tuple[str, int, int, int, Schedule]]:
    """(name, stages, chunks, microbatches, schedule) for all numbers that a schedule takes."""
    found = []
    for name in SCHEDULES:
        for p, m in SIZES:
            for v in (2, 3) if name == "interleaved" else (1,):
                if name != "interleaved" or m % p == 0:
                    found.append((name, p, v, m, build_schedule(name, p, v, m)))
    return found


def test_1f1b_on_four_stages_warms_up_alternates_and_drains() -> None:
    assert one_forward_one_backward(4, 1, 8) == [
        spelled("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        spelled("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        spelled("F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        spelled("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert gpipe(3, 1, 2) == [spelled("F0 F1 B0 B1")] * 3


def test_interleaved_on_two_stages_with_two_chunks() -> None:
    assert interleaved(2, 2, 4) == [
        spelled("F0 F1 F-0 F-1 F2 B-0 F3 B-1 F-2 B0 F-3 B1 B-2 B-3 B2 B3"),
        spelled("F0 F1 F-0 B-0 F-1 B-1 F2 B0 F3 B1 F-2 B-2 F-3 B-3 B2 B3"),
    ]


def test_zb_h1_delays_the_weight_gradients_of_rank_r_by_r_microbatches() -> None:
    assert zero_bubble_h1(3, 1, 4) == [
        spelled("F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        spelled("F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"),
        spelled("F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    ]


@pytest.mark.parametrize(
    ("p", "v", "m", "group"), [(2, 2, 4, 2), (4, 2, 8, 4), (4, 3, 8, 4), (4, 2, 14, 5), (3, 2, 7, 7)]
)
def test_interleaved_has_megatron_cores_order_and_warm_up(p: int, v: int, m: int, group: int) -> None:
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = [(chunk, microbatch) for microbatch, chunk in megatron.get_schedule_table(m, v, group)]
    for rank, actions in enumerate(interleaved(p, v, m, group)):
        assert [action[1:] for action in actions if action.kind == FORWARD] == table
        backwards = [(v - 1 - action.chunk, action.microbatch) for action in actions if action.kind == BACKWARD]
        assert backwards == table
        ahead = min(2 * (p - rank - 1) + (v - 1) * group, m * v)
        phases = [FORWARD] * ahead + [FORWARD, BACKWARD] * (m * v - ahead) + [BACKWARD] * ahead
        assert [action.kind for action in actions] == phases


@pytest.mark.parametrize(
    ("p", "v", "m", "group", "numbers"),
    [
        (4, 2, 6, None, ("6 microbatches", "4 stages", "groups of 4", "has 2")),
        (4, 2, 3, None, ("3 microbatches", "4 stages", "has 3")),
        (4, 2, 11, 8, ("11 microbatches", "groups of 8", "has 3")),
        (4, 2, 8, 3, ("groups of 3", "4 stages")),
        (4, 1, 8, None, ("at least 2 chunks",)),
    ],
)
def test_interleaved_refuses_what_it_cannot_do_with_the_numbers(
    p: int, v: int, m: int, group: int | None, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        build_schedule("interleaved", p, v, m, group_size=group)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_other_schedules_refuse_several_chunks(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} has one chunk per rank, not 2"):
        build_schedule(name, 4, 2, 8)


def test_evaluation_runs_every_microbatch_through_every_chunk_in_groups() -> None:
    assert forward_only(2, 2, 3) == [spelled("F0 F1 F-0 F-1 F2 F-2")] * 2
    assert forward_only(1, 1, 2) == [spelled("F0 F1")]
