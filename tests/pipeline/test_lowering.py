"""Sends, receives and waits are where they must be."""

from __future__ import annotations

from megalite.pipeline.lowering import COMMUNICATION, RECEIVES, lower
from megalite.pipeline.schedules import Action, Schedule, build_schedule, forward_only, one_forward_one_backward


def names(actions: list[Action]) -> list[str]:
    return [f"{action.kind} {action.chunk} {action.microbatch}" for action in actions]


def lowered_cases() -> list[tuple[int, int, Schedule, Schedule]]:
    cases = []
    for p in (2, 3, 4):
        for name, v in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3)):
            schedule = build_schedule(name, p, v, 2 * p)
            cases.append((p, v, schedule, lower(schedule, p, v)))
        cases.append((p, 2, forward_only(p, 2, 5), lower(forward_only(p, 2, 5), p, 2)))
    return cases


def test_one_stage_needs_no_communication() -> None:
    schedule = one_forward_one_backward(1, 1, 3)
    assert lower(schedule, 1, 1) == schedule


def test_two_stages_by_hand() -> None:
    first, last = lower(one_forward_one_backward(2, 1, 2), 2, 1)
    assert names(first) == [
        "forward 0 0",
        "send_forward 0 0",
        "recv_backward 0 0",
        "forward 0 1",
        "send_forward 0 1",
        "recv_backward 0 1",
        "wait_backward 0 0",
        "backward 0 0",
        "wait_backward 0 1",
        "backward 0 1",
    ]
    assert names(last) == [
        "recv_forward 0 0",
        "wait_forward 0 0",
        "forward 0 0",
        "recv_forward 0 1",
        "backward 0 0",
        "send_backward 0 0",
        "wait_forward 0 1",
        "forward 0 1",
        "backward 0 1",
        "send_backward 0 1",
    ]


def test_lowering_changes_neither_the_work_nor_its_order() -> None:
    for _, _, schedule, lowered in lowered_cases():
        assert [[a for a in actions if a.kind not in COMMUNICATION] for actions in lowered] == schedule


def test_a_receive_is_posted_one_action_before_the_one_that_needs_it_unless_it_answers_that_action() -> None:
    for p, v, schedule, lowered in lowered_cases():
        for rank in range(p):
            for before, action in zip(schedule[rank], schedule[rank][1:], strict=False):
                receive = action._replace(kind=RECEIVES.get(action.kind, "none"))
                if receive in lowered[rank]:
                    early = lowered[rank].index(receive) < lowered[rank].index(before)
                    assert early == (before.kind != "forward" or before[1:] != action[1:]), (p, v, rank, action)
