"""A schedule is data: for each pipeline rank, the list of actions it executes in order.

Key idea: a schedule is a pure function of (stages, chunks, microbatches). It says what is computed and in which order;
moving tensors between stages is not its concern (`lowering.py` adds that). A new schedule is one more function in
`SCHEDULES`.

A rank holds `chunks` pieces of the model (virtual stages). Chunk c of rank r is global stage c * stages + r, so that a
microbatch goes once round all ranks for each chunk.

In every schedule each chunk runs its backwards in the order of microbatches. Gradients are therefore summed in the same
order as by one process, and come out bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megalite.config.errors import UserError

FORWARD = "forward"
BACKWARD = "backward"  # gradients of inputs and weights in one go; or split:
BACKWARD_INPUT = "backward_input"  # what the previous stage waits for
BACKWARD_WEIGHT = "backward_weight"  # what nobody waits for


class Action(NamedTuple):
    """One unit of work of a rank: `kind` on one of its model chunks and one microbatch. Kinds are an open set."""

    kind: str
    chunk: int
    microbatch: int


Schedule = list[list[Action]]  # one list a rank


def gpipe(stages: int, chunks: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards."""
    _one_chunk("gpipe", chunks)
    forwards = [Action(FORWARD, 0, m) for m in range(microbatches)]
    backwards = [Action(BACKWARD, 0, m) for m in range(microbatches)]
    return [_alternate(forwards, backwards, ahead=microbatches) for _ in range(stages)]


def one_forward_one_backward(stages: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021): rank r runs `stages - r - 1` forwards ahead, then alternates, then drains."""
    _one_chunk("1f1b", chunks)
    forwards = [Action(FORWARD, 0, m) for m in range(microbatches)]
    backwards = [Action(BACKWARD, 0, m) for m in range(microbatches)]
    return [_alternate(forwards, backwards, ahead=stages - rank - 1) for rank in range(stages)]


def interleaved(stages: int, chunks: int, microbatches: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): a microbatch visits each rank once per chunk, so that the bubble is
    divided by `chunks`.

    `group_size` microbatches (default: `stages`) run on a chunk before the next chunk's turn. Backwards take the
    chunks from last to first. A number of microbatches that leaves gaps raises a UserError.
    """
    group = stages if group_size is None else group_size
    _check_interleaved(stages, chunks, microbatches, group)
    order = _in_groups(chunks, microbatches, group)
    forwards = [Action(FORWARD, chunk, m) for chunk, m in order]
    backwards = [Action(BACKWARD, chunks - 1 - chunk, m) for chunk, m in order]
    return [
        _alternate(forwards, backwards, ahead=2 * (stages - rank - 1) + (chunks - 1) * group) for rank in range(stages)
    ]


def zero_bubble_h1(stages: int, chunks: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023): 1F1B with the backward split. Only the input gradient keeps the previous stage waiting;
    rank r runs its weight gradients r microbatches later, which fills the gaps at the end."""
    _one_chunk("zb-h1", chunks)
    forwards = [Action(FORWARD, 0, m) for m in range(microbatches)]
    inputs = [Action(BACKWARD_INPUT, 0, m) for m in range(microbatches)]
    weights = [Action(BACKWARD_WEIGHT, 0, m) for m in range(microbatches)]
    schedule: Schedule = []
    for rank in range(stages):
        actions: list[Action] = []
        for action in _alternate(forwards, inputs, ahead=stages - rank - 1):
            actions.append(action)
            if action.kind == BACKWARD_INPUT and action.microbatch >= rank:
                actions.append(weights[action.microbatch - rank])
        actions += weights[max(0, microbatches - rank) :]
        schedule.append(actions)
    return schedule


def forward_only(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Evaluation: every microbatch through every chunk, `stages` microbatches on a chunk before the next one's turn."""
    actions = [Action(FORWARD, chunk, m) for chunk, m in _in_groups(chunks, microbatches, stages)]
    return [list(actions) for _ in range(stages)]


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}


def build_schedule(
    name: str, stages: int, chunks: int, microbatches: int, *, group_size: int | None = None
) -> Schedule:
    """The schedule called `name`. `group_size` is the interleaved schedule's alone. A UserError where the numbers don't
    fit."""
    if name == "interleaved":
        return interleaved(stages, chunks, microbatches, group_size)
    return SCHEDULES[name](stages, chunks, microbatches)


def _alternate(forwards: list[Action], backwards: list[Action], *, ahead: int) -> list[Action]:
    """Run `ahead` forwards (or all), then alternate forward and backward, then run the backwards that are left."""
    count = len(forwards)
    ahead = min(ahead, count)
    warm_up = forwards[:ahead]
    steady = [action for pair in zip(forwards[ahead:], backwards[: count - ahead], strict=True) for action in pair]
    cool_down = backwards[count - ahead :]
    return warm_up + steady + cool_down


def _in_groups(chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of forwards: a group of microbatches through one chunk after the other."""
    return [
        (chunk, m)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for m in range(first, min(first + group, microbatches))
    ]


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise UserError(f"schedule {name} has one chunk per rank, not {chunks}: use interleaved")


def _check_interleaved(stages: int, chunks: int, microbatches: int, group: int) -> None:
    if chunks < 2:
        raise UserError("schedule interleaved needs at least 2 chunks per rank: use 1f1b")
    if group < stages:
        raise UserError(f"schedule interleaved: groups of {group} microbatches are too small for {stages} stages")
    last = microbatches % group
    if 0 < last < stages:
        raise UserError(
            f"schedule interleaved can't run {microbatches} microbatches on {stages} stages in groups of {group}: the "
            f"last group has {last}; use a multiple of {group}"
        )
