"""A schedule is data: for each pipeline rank, the list of actions it executes in order.

Key idea: a schedule is a pure function of (stages, chunks, microbatches). It says what is computed and in which order;
moving tensors between stages is not its concern. A new schedule is one more function in `SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"


class Action(NamedTuple):
    """One unit of work of a rank: `kind` on one of its model chunks and one microbatch. Kinds are an open set."""

    kind: str
    chunk: int
    microbatch: int


Schedule = list[list[Action]]  # one list a rank


def one_forward_one_backward(stages: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021): rank r runs `stages - r - 1` forwards ahead, then alternates, then drains."""
    assert chunks == 1, "1F1B runs one chunk a rank"
    schedule: Schedule = []
    for rank in range(stages):
        ahead = min(stages - rank - 1, microbatches)
        actions = [Action(FORWARD, 0, m) for m in range(ahead)]
        for m in range(ahead, microbatches):
            actions += [Action(FORWARD, 0, m), Action(BACKWARD, 0, m - ahead)]
        actions += [Action(BACKWARD, 0, m) for m in range(microbatches - ahead, microbatches)]
        schedule.append(actions)
    return schedule


def forward_only(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Evaluation: every microbatch through every chunk."""
    actions = [Action(FORWARD, chunk, m) for m in range(microbatches) for chunk in range(chunks)]
    return [list(actions) for _ in range(stages)]


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {"1f1b": one_forward_one_backward}
