"""Makespans and live activations equal the closed formulas; what is wrong with a schedule is found and named."""

from __future__ import annotations

import pytest

from megalite.pipeline.lowering import RECV_FORWARD, SEND_FORWARD, WAIT_BACKWARD, lower
from megalite.pipeline.schedules import BACKWARD, FORWARD, Action, Schedule, build_schedule, forward_only
from megalite.pipeline.simulator import ScheduleError, simulate, stage_costs, validate
from tests.pipeline.test_schedules import every_schedule


def test_every_schedule_is_proved_correct() -> None:
    for _, p, v, m, schedule in every_schedule():
        validate(schedule, p, v, m)
        validate(lower(schedule, p, v), p, v, m)


def test_interleaved_with_other_groups_and_evaluation_with_any_number_are_proved_correct() -> None:
    for p, v, m, group in ((2, 2, 12, 12), (2, 3, 7, 5), (4, 2, 9, 5), (4, 2, 24, 24), (3, 2, 10, 7)):
        validate(build_schedule("interleaved", p, v, m, group_size=group), p, v, m)
    for p, v, m in ((2, 2, 3), (4, 1, 5), (4, 3, 6), (1, 1, 2)):
        validate(forward_only(p, v, m), p, v, m)


def test_makespans_equal_the_formulas() -> None:
    """F = B = W = 1 for all chunks of a rank together: work m(F + B + W) and a bubble."""
    for name, p, v, m, schedule in every_schedule():
        if name == "zb-h1":  # with fewer microbatches than stages its weight gradients can't fill the gaps
            bubble = (p - 1) * 2 - (min(m, p) - 1)
            assert m < p or bubble == (p - 1) * (1 + 1 - 1)
        else:
            bubble = (p - 1) * 3 / v
        timeline = simulate(lower(schedule, p, v), stage_costs(v))
        assert timeline.makespan == pytest.approx(3 * m + bubble, rel=1e-12), (name, p, v, m)
        assert timeline.bubble_share == pytest.approx(bubble / (3 * m + bubble), abs=1e-12)


def test_bubbles_scale_with_the_costs_of_forward_and_backward() -> None:
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        costs = stage_costs(v, forward=2.0, backward_input=1.5, backward_weight=2.5)
        timeline = simulate(lower(build_schedule(name, 4, v, 8), 4, v), costs)
        assert timeline.makespan == pytest.approx((8 + 3 / v) * 6.0)


def test_live_activations_equal_the_formulas() -> None:
    for name, p, v, m, schedule in every_schedule():
        for rank, peak in enumerate(simulate(lower(schedule, p, v), stage_costs(v)).peak_live()):
            ahead = 2 * (p - rank - 1) + (v - 1) * p
            wanted = {"gpipe": m, "1f1b": min(m, p - rank), "zb-h1": min(m, p), "interleaved": min(m * v, ahead + 1)}
            assert peak == wanted[name], (name, p, v, m, rank)


def test_messages_take_time_of_their_own() -> None:
    """1F1B of two stages by hand, F = 1, B = 2, travel 0.5. The last rank starts F0 at 1.5, ends B0 at 4.5 and B1 at
    7.5; F2 comes 4 after B0's end (travel, B0, F2, travel), so at 8.5; F3, 4 after B1's end, comes just in time at
    11.5; B3 ends at 14.5, and the first rank's B3 half a unit and 2 later."""
    schedule = lower(build_schedule("1f1b", 2, 1, 4), 2, 1)
    assert simulate(schedule, stage_costs()).makespan == 15.0
    assert simulate(schedule, stage_costs(transfer=0.5)).makespan == 17.0


def test_a_slower_stage_sets_the_pace() -> None:
    """The last rank's work is 10 x (2 + 4); before it comes F0 of the first rank, after it that rank's B9."""
    schedule = lower(build_schedule("1f1b", 2, 1, 10), 2, 1)
    times = {(0, FORWARD): 1.0, (0, BACKWARD): 2.0, (1, FORWARD): 2.0, (1, BACKWARD): 4.0}
    assert simulate(schedule, lambda rank, action: times.get((rank, action.kind), 0.0)).makespan == 1 + 60 + 2


def broken(change: str) -> Schedule:
    """1F1B of 3 stages and 4 microbatches with one fault on rank 1."""
    lowered = lower(build_schedule("1f1b", 3, 1, 4), 3, 1)
    mine = lowered[1]
    swap = {
        "backwards out of order": (Action(BACKWARD, 0, 1), Action(BACKWARD, 0, 2)),
        "backward before forward": (Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)),
        "compute before wait": (Action(WAIT_BACKWARD, 0, 1), Action(BACKWARD, 0, 1)),
        "sends swapped": (Action(SEND_FORWARD, 0, 0), Action(SEND_FORWARD, 0, 1)),
    }
    if change in swap:
        first, second = (mine.index(action) for action in swap[change])
        mine[first], mine[second] = mine[second], mine[first]
    elif change == "forward twice":
        mine.append(Action(FORWARD, 0, 3))
    elif change == "no backward":
        mine.remove(Action(BACKWARD, 0, 3))
    elif change == "no send":
        mine.remove(Action(SEND_FORWARD, 0, 2))
    elif change == "no receive":
        mine.remove(Action(RECV_FORWARD, 0, 2))
    elif change == "microbatch too many":
        mine.append(Action(FORWARD, 0, 4))
    return lowered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("backwards out of order", r"rank 1, action \d+, backward\(chunk 0, microbatch 2\)"),
        ("backward before forward", r"rank 1, action \d+, .*needs forward before it"),
        ("compute before wait", r"backward\(chunk 0, microbatch 1\): needs wait_backward before it"),
        ("sends swapped", r"send_forward\(chunk 0, microbatch 1\): needs forward before it"),
        ("forward twice", r"forward\(chunk 0, microbatch 3\): runs a second time"),
        ("no backward", r"send_backward\(chunk 0, microbatch 3\): needs backward or backward_input before it"),
        ("no send", "rank 1: send_forward of chunk 0, microbatch 2 is missing"),
        ("no receive", r"wait_forward\(chunk 0, microbatch 2\): needs recv_forward before it"),
        ("microbatch too many", r"forward\(chunk 0, microbatch 4\): there is no such thing"),
    ],
)
def test_a_fault_is_named(change: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(broken(change), 3, 1, 4)


def test_backwards_out_of_order_are_named_where_nothing_else_is_wrong() -> None:
    schedule = build_schedule("gpipe", 2, 1, 3)
    for actions in schedule:
        actions[-1], actions[-2] = actions[-2], actions[-1]
    with pytest.raises(ScheduleError, match=r"rank 0, .*backward\(chunk 0, microbatch 1\): comes after microbatch 2"):
        validate(schedule, 2, 1, 3)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Rank 0 wants the gradient of microbatch 0 before it runs microbatch 1, which rank 1 wants first."""
    first = [Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1)]
    last = [Action(FORWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 0), Action(BACKWARD, 0, 1)]
    with pytest.raises(ScheduleError, match=r"hangs: rank 0 at wait_backward.*microbatch 0\), rank 1 at wait_forward"):
        validate([first, last], 2, 1, 2)


def test_two_ends_of_a_lane_that_disagree_about_the_order_are_found() -> None:
    schedule = forward_only(2, 1, 2)
    schedule[1].reverse()
    with pytest.raises(ScheduleError, match=r"microbatch=0\) is sent where its receiver expects .*microbatch=1"):
        validate(schedule, 2, 1, 2)


def test_a_list_for_each_stage() -> None:
    with pytest.raises(ScheduleError, match="2 lists for 3 stages"):
        validate(build_schedule("1f1b", 2, 1, 2), 3, 1, 2)
