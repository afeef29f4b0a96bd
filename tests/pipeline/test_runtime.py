"""The runtime executes a list in order, tells its recorder, and gives what one process gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import BACKWARD, FORWARD, Action, one_forward_one_backward
from tests.pipeline import toy

ONE_CHUNK = ("gpipe", "1f1b", "zb-h1")


class _Notebook:
    """An executor that notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[Action] = []

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda chunk, microbatch, *_: self.calls.append(Action(kind, chunk, microbatch))


def test_actions_run_in_the_order_of_the_list() -> None:
    notebook = _Notebook()
    for actions in one_forward_one_backward(4, 1, 8):
        notebook.calls.clear()
        PipelineRuntime(notebook).run(actions)
        assert notebook.calls == actions


def test_the_recorder_hears_of_every_action_with_times_that_do_not_overlap() -> None:
    records: list[tuple[Action, float, float]] = []
    (actions,) = one_forward_one_backward(1, 1, 5)
    PipelineRuntime(_Notebook(), recorders=[lambda *record: records.append(record)]).run(actions)
    assert [action for action, _, _ in records] == actions
    moments = [moment for _, begin, end in records for moment in (begin, end)]
    assert moments == sorted(moments)


def test_an_unknown_kind_of_action_is_an_error_and_stops_the_run() -> None:
    notebook = _Notebook()
    with pytest.raises(KeyError, match="levitate"):
        PipelineRuntime(notebook).run([Action(FORWARD, 0, 0), Action("levitate", 0, 0), Action(BACKWARD, 0, 0)])
    assert notebook.calls == [Action(FORWARD, 0, 0)]


def test_a_new_kind_of_action_needs_a_handler_and_nothing_else() -> None:
    runtime, reduced = PipelineRuntime(_Notebook()), []
    runtime.handlers["reduce"] = reduced.append
    runtime.run([Action(FORWARD, 0, 0), Action("reduce", 0, 0)])
    assert reduced == [Action("reduce", 0, 0)]


def expected_peak(name: str, stages: int, chunks: int, count: int, group: int, rank: int) -> int:
    """Live activations by the closed formulas."""
    ahead = 2 * (stages - rank - 1) + (chunks - 1) * group
    peaks = {"gpipe": count, "1f1b": min(count, stages - rank), "zb-h1": min(count, stages)}
    return peaks.get(name, min(chunks * count, ahead + 1))


def check(
    pool: ProcessPool,
    name: str,
    stages: int,
    chunks: int,
    sizes: list[int],
    *,
    steps: int = 1,
    group: int | None = None,
    evaluate: int = 0,
) -> None:
    """Gradients and losses are bitwise those of one process, live activations those of the formulas."""
    outcomes = pool.run(toy.train, stages, name, chunks, sizes, steps, group, evaluate, layout=Layout(pp=stages))
    truth, losses = toy.one_process(stages * chunks, sizes)
    for rank, outcome in enumerate(outcomes):
        for stage, grads in outcome.grads.items():
            assert all(map(torch.equal, grads, truth[stage])), f"{name}, stage {stage}"
            assert len(grads) == 2
        assert outcome.peak_live == outcome.peak_kept
        assert outcome.peak_live == expected_peak(name, stages, chunks, len(sizes), group or stages, rank)
        assert outcome.left_over == 0
    assert sorted({stage for outcome in outcomes for stage in outcome.grads}) == list(range(stages * chunks))
    assert outcomes[-1].losses == losses
    assert all(found == losses for found in outcomes[-1].evaluations)


@pytest.mark.parametrize("name", ONE_CHUNK)
@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_equal_those_of_one_process_bitwise(pool: ProcessPool, name: str, stages: int) -> None:
    for count in (1, 3, 4, 8):
        check(pool, name, stages, 1, [3] * count)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_interleaved_gradients_equal_those_of_one_process_bitwise(pool: ProcessPool, chunks: int, stages: int) -> None:
    for count in (stages, 2 * stages, 3 * stages):
        check(pool, "interleaved", stages, chunks, [3] * count)


@pytest.mark.parametrize(("stages", "count", "group"), [(2, 7, 5), (2, 12, 12), (4, 9, 5), (3, 6, 3)])
def test_groups_of_any_allowed_size_give_the_same_gradients(
    pool: ProcessPool, stages: int, count: int, group: int
) -> None:
    check(pool, "interleaved", stages, 2, [2] * count, group=group)


@pytest.mark.parametrize(("name", "chunks"), [*((name, 1) for name in ONE_CHUNK), ("interleaved", 2)])
def test_shapes_may_differ_from_microbatch_to_microbatch(pool: ProcessPool, name: str, chunks: int) -> None:
    check(pool, name, 4, chunks, [1, 7, 2, 5, 3, 11, 4, 6])


@pytest.mark.parametrize("stages", [2, 4])
def test_many_steps_with_evaluations_between_them_neither_hang_nor_mix_up_tensors(
    pool: ProcessPool, stages: int
) -> None:
    check(pool, "interleaved", stages, 2, [1, 2, 3, 4], steps=15, evaluate=3)


def test_one_process_with_several_chunks_hands_tensors_to_itself() -> None:
    outcome = toy.train(single_process_mesh(), "interleaved", 3, [2, 3, 4], 2, None, 1)
    truth, losses = toy.one_process(3, [2, 3, 4])
    assert outcome.losses == losses
    assert all(torch.equal(a, b) for stage in truth for a, b in zip(outcome.grads[stage], truth[stage], strict=True))
