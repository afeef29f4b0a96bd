"""Timelines of runs are read back step by step, and give the costs that a simulation needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, FORWARD, Action, build_schedule
from megalite.pipeline.simulator import simulate
from megalite.pipeline.timeline import Timeline, median_costs, peak_live, read_steps


def times(rank: int, action: Action) -> float:
    """Forward 1, backward 2; rank 1 is twice as slow; messages 0.25."""
    return {FORWARD: 1.0, BACKWARD: 2.0}[action.kind] * (1 + rank) if action.kind in (FORWARD, BACKWARD) else 0.25


def write_run(directory: Path, steps: int, peers: int = 1, late: float = 0.0) -> Timeline:
    """The files of a run of 1F1B, 2 stages with `peers` ranks each, that takes 100 a step; the second stage's clock is
    `late`. Returns the first step on the first one's clock."""
    timeline = simulate(lower(build_schedule("1f1b", 2, 1, 3), 2, 1), times)
    for stage, spans in enumerate(timeline.ranks):
        for peer in range(peers):
            with (directory / f"rank_{stage * peers + peer}.jsonl").open("w") as file:
                for step in range(steps):
                    offset = 100 * step - late * stage
                    for action, start, end in spans:
                        entry = {**action._asdict(), "start_ms": offset + start, "end_ms": offset + end}
                        file.write(json.dumps(entry) + "\n")
    return timeline


def test_each_step_of_a_run_is_a_timeline(tmp_path: Path) -> None:
    first = write_run(tmp_path, steps=3)
    steps = read_steps(tmp_path)
    assert steps[0] == first
    assert [step.start for step in steps] == [0, 100, 200]
    assert [step.makespan for step in steps] == [first.makespan] * 3


def test_ranks_need_not_have_the_same_clock(tmp_path: Path) -> None:
    first = write_run(tmp_path, steps=2, late=7.5)
    assert read_steps(tmp_path)[0] == first


def test_of_several_ranks_on_a_stage_the_first_is_read(tmp_path: Path) -> None:
    first = write_run(tmp_path, steps=1, peers=6)  # rank_10 comes after rank_9
    assert read_steps(tmp_path, stages=2) == [first]
    assert len(read_steps(tmp_path)[0].ranks) == 12


def test_a_step_that_not_all_ranks_finished_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    lines = (tmp_path / "rank_1.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rank_1.jsonl").write_text("".join(lines[: len(lines) // 2]))
    assert len(read_steps(tmp_path)) == 1


def test_the_costs_are_the_medians_per_rank_and_kind_and_predict_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    costs = median_costs(read_steps(tmp_path))
    assert costs(1, Action(FORWARD, 0, 7)) == 2.0
    assert costs(0, Action(BACKWARD, 0, 7)) == 2.0
    predicted = simulate(lower(build_schedule("1f1b", 2, 1, 3), 2, 1), costs)
    assert predicted.makespan == 1 + 3 * 6 + 2  # without the travel of messages
    with pytest.raises(UserError, match="no backward_input of chunk 0 on rank 1"):
        costs(1, Action(BACKWARD_INPUT, 0, 0))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no rank_N\.jsonl"):
        read_steps(tmp_path)
    write_run(tmp_path, steps=1)
    with pytest.raises(UserError, match="--stages 3 does not divide the 2 files"):
        read_steps(tmp_path, stages=3)
    with (tmp_path / "rank_0.jsonl").open("a") as file:
        file.write('{"kind": "forward"}\n')
    with pytest.raises(UserError, match=r"rank_0\.jsonl:\d+: not an object with kind, chunk"):
        read_steps(tmp_path)


def test_activations_live_from_forward_to_backward_and_not_in_an_evaluation() -> None:
    def actions(text: str) -> list[Action]:
        kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": "backward_weight"}
        return [Action(kinds[word[0]], 0, int(word[1:])) for word in text.split()]

    assert peak_live(actions("F0 F1 B0 F2 B1 B2")) == 2
    assert peak_live(actions("F0 I0 F1 I1 W0 F2 W1 I2 W2")) == 2
    assert peak_live(actions("F0 I0 F1 I1 F2 W0 W1 I2 W2")) == 3
    assert peak_live(actions("F0 F1 F2")) == 0
