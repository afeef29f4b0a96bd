"""1F1B against lists worked out by hand, and the laws that any schedule keeps."""

from __future__ import annotations

import pytest

from megalite.pipeline.schedules import BACKWARD, FORWARD, SCHEDULES, Action, forward_only, one_forward_one_backward

GRID = [(1, 1), (1, 4), (2, 1), (2, 3), (4, 1), (4, 2), (4, 4), (4, 8), (8, 3), (8, 32)]


def spelled(text: str) -> list[Action]:
    """`F0 B0` → actions of chunk 0."""
    kinds = {"F": FORWARD, "B": BACKWARD}
    return [Action(kinds[word[0]], 0, int(word[1:])) for word in text.split()]


def test_one_stage_runs_each_microbatch_forward_then_backward() -> None:
    assert one_forward_one_backward(1, 1, 1) == [spelled("F0 B0")]
    assert one_forward_one_backward(1, 1, 4) == [spelled("F0 B0 F1 B1 F2 B2 F3 B3")]


def test_four_stages_with_two_microbatches_only_warm_up_and_drain() -> None:
    assert one_forward_one_backward(4, 1, 2) == [
        spelled("F0 F1 B0 B1"),
        spelled("F0 F1 B0 B1"),
        spelled("F0 F1 B0 B1"),
        spelled("F0 B0 F1 B1"),
    ]


def test_four_stages_with_eight_microbatches_warm_up_alternate_and_drain() -> None:
    assert one_forward_one_backward(4, 1, 8) == [
        spelled("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        spelled("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        spelled("F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        spelled("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_each_microbatch_runs_forward_once_and_then_backward_once_on_every_stage(
    name: str, stages: int, microbatches: int
) -> None:
    schedule = SCHEDULES[name](stages, 1, microbatches)
    assert len(schedule) == stages
    for actions in schedule:
        for m in range(microbatches):
            assert actions.count(Action(FORWARD, 0, m)) == 1
            assert actions.count(Action(BACKWARD, 0, m)) == 1
            assert actions.index(Action(FORWARD, 0, m)) < actions.index(Action(BACKWARD, 0, m))
        assert len(actions) == 2 * microbatches


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_backwards_run_in_the_order_of_microbatches(name: str, stages: int, microbatches: int) -> None:
    for actions in SCHEDULES[name](stages, 1, microbatches):
        order = [action.microbatch for action in actions if action.kind == BACKWARD]
        assert order == sorted(order)


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_rank_r_of_p_keeps_at_most_the_smaller_of_m_and_p_minus_r_activations(stages: int, microbatches: int) -> None:
    for rank, actions in enumerate(one_forward_one_backward(stages, 1, microbatches)):
        live = peak = 0
        for action in actions:
            live += 1 if action.kind == FORWARD else -1
            peak = max(peak, live)
        assert peak == min(microbatches, stages - rank)


def test_evaluation_runs_every_microbatch_through_every_chunk_in_order() -> None:
    assert forward_only(2, 2, 2) == [[Action(FORWARD, chunk, m) for m in (0, 1) for chunk in (0, 1)]] * 2
