"""The runtime executes a list in order, and tells its recorder."""

from __future__ import annotations

import pytest

from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import BACKWARD, FORWARD, Action, one_forward_one_backward


class _Notebook:
    """An executor that notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[Action] = []

    def forward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(Action(FORWARD, chunk, microbatch))

    def backward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(Action(BACKWARD, chunk, microbatch))


def test_actions_run_in_the_order_of_the_list() -> None:
    notebook = _Notebook()
    for actions in one_forward_one_backward(4, 1, 8):
        notebook.calls.clear()
        PipelineRuntime(notebook).run(actions)
        assert notebook.calls == actions


def test_the_recorder_hears_of_every_action_with_times_that_do_not_overlap() -> None:
    records: list[tuple[Action, float, float]] = []
    (actions,) = one_forward_one_backward(1, 1, 5)
    PipelineRuntime(_Notebook(), recorder=lambda *record: records.append(record)).run(actions)
    assert [action for action, _, _ in records] == actions
    moments = [moment for _, begin, end in records for moment in (begin, end)]
    assert moments == sorted(moments)


def test_an_unknown_kind_of_action_is_an_error_and_stops_the_run() -> None:
    notebook = _Notebook()
    with pytest.raises(KeyError, match="levitate"):
        PipelineRuntime(notebook).run([Action(FORWARD, 0, 0), Action("levitate", 0, 0), Action(BACKWARD, 0, 0)])
    assert notebook.calls == [Action(FORWARD, 0, 0)]
