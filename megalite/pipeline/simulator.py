"""Simulates lowered schedules: when each action would run, and whether all of them can.

Key idea: ranks meet only in messages, and a message has come when it was sent, its receive was posted, and the one
before it in its lane has come (in-order rendezvous, as on NCCL). Ranks may therefore be advanced in any order, each as
far as it gets; if none gets any further, the real run would hang there too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque

from megalite.pipeline.lowering import (
    COMMUNICATION,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    WAIT_BACKWARD,
    WAIT_FORWARD,
    WAITS,
    Message,
    lower,
    message_of,
)
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from megalite.pipeline.timeline import Costs, Span, Timeline


class ScheduleError(ValueError):
    """A schedule that isn't complete, runs something too early, or hangs."""


def stage_costs(
    chunks: int = 1, *, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0,
    transfer: float = 0.0,
) -> Costs:  # fmt: skip
    """Equal stages. The costs are those of all chunks of a rank together, so that schedules compare on one model;
    `transfer`: how long a message travels."""
    times = {
        FORWARD: forward / chunks,
        BACKWARD: (backward_input + backward_weight) / chunks,
        BACKWARD_INPUT: backward_input / chunks,
        BACKWARD_WEIGHT: backward_weight / chunks,
        **dict.fromkeys(SENDS.values(), transfer),
    }
    return lambda rank, action: times.get(action.kind, 0.0)


def simulate(lowered: Schedule, costs: Costs) -> Timeline:
    """The timeline of a lowered schedule. One that hangs raises a ScheduleError that says where each rank stands."""
    stages = len(lowered)
    chunks = 1 + max((action.chunk for actions in lowered for action in actions), default=0)
    lanes: dict[tuple[int, int, bool], _Lane] = defaultdict(_Lane)
    ranks: list[list[Span]] = [[] for _ in lowered]

    def run_next(rank: int) -> bool:
        """Execute a rank's next action, if there is one and it needn't wait for another rank."""
        if len(ranks[rank]) == len(lowered[rank]):
            return False
        action = lowered[rank][len(ranks[rank])]
        now = ranks[rank][-1].end if ranks[rank] else 0.0
        end = now
        if action.kind in COMMUNICATION:
            message = message_of(action, rank, stages, chunks)
            assert message is not None, f"rank {rank}, {action_text(action)}: no stage there"
            lane = lanes[message.source % stages, message.target % stages, message.source < message.target]
            if action.kind in WAITS.values():
                if message not in lane.arrivals:
                    return False
                end = max(now, lane.arrivals[message])
            elif action.kind in SENDS.values():
                lane.sent.append((message, now, costs(rank, action)))
            else:
                lane.posted.append((message, now))
            lane.deliver()
        else:
            end = now + costs(rank, action)
        ranks[rank].append(Span(action, now, end))
        return True

    while any(run_next(rank) for rank in range(stages)):
        pass
    stuck = [
        f"rank {rank} at {action_text(actions[len(spans)])}"
        for rank, (actions, spans) in enumerate(zip(lowered, ranks, strict=True))
        if len(spans) < len(actions)
    ]
    if stuck:
        raise ScheduleError("the schedule hangs: " + ", ".join(stuck))
    return Timeline(ranks)


class _Lane:
    """Messages of one direction from one rank to another."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Message, float, float]] = deque()  # with the moment, and how long it travels
        self.posted: deque[tuple[Message, float]] = deque()
        self.arrivals: dict[Message, float] = {}
        self.last = 0.0

    def deliver(self) -> None:
        """Let the messages arrive that are both sent and expected."""
        while self.sent and self.posted:
            message, sent, travel = self.sent.popleft()
            expected, posted = self.posted.popleft()
            if message != expected:
                raise ScheduleError(f"{message} is sent where its receiver expects {expected}")
            self.last = self.arrivals[message] = max(self.last, sent, posted) + travel


def action_text(action: Action) -> str:
    """An action for people."""
    return f"{action.kind}(chunk {action.chunk}, microbatch {action.microbatch})"


# One kind of each group must have run before, for the same chunk and microbatch; communication only where it exists.
BEFORE: dict[str, list[tuple[str, ...]]] = {
    FORWARD: [(WAIT_FORWARD,)],
    BACKWARD: [(FORWARD,), (WAIT_BACKWARD,)],
    BACKWARD_INPUT: [(FORWARD,), (WAIT_BACKWARD,)],
    BACKWARD_WEIGHT: [(BACKWARD_INPUT,)],
    WAIT_FORWARD: [(RECV_FORWARD,)],
    WAIT_BACKWARD: [(RECV_BACKWARD,)],
    SEND_FORWARD: [(FORWARD,)],
    SEND_BACKWARD: [(BACKWARD, BACKWARD_INPUT)],
}
BACKWARDS = (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def validate(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> None:
    """Prove a schedule or lowered schedule correct, or raise a ScheduleError that names the first offending action.

    Per rank: each microbatch runs forward, and backward whole or split, exactly once on each chunk (in an evaluation
    forward alone), in an order that dependencies allow, each chunk's backwards in the order of microbatches; what an
    action needs was received and waited for, what it gives is sent. Between ranks: nothing hangs.
    """
    if len(schedule) != stages:
        raise ScheduleError(f"{len(schedule)} lists for {stages} stages")
    kinds = {action.kind for actions in schedule for action in actions}
    lowered = schedule if kinds & COMMUNICATION else lower(schedule, stages, chunks)
    for rank, actions in enumerate(lowered):
        _validate_rank(actions, rank, stages, chunks, microbatches, trains=not kinds.isdisjoint(BACKWARDS))
    simulate(lowered, stage_costs())


def _validate_rank(
    actions: list[Action], rank: int, stages: int, chunks: int, microbatches: int, *, trains: bool
) -> None:
    def exists(action: Action) -> bool:
        return action.kind not in COMMUNICATION or message_of(action, rank, stages, chunks) is not None

    done: set[Action] = set()
    newest = {(kind, chunk): -1 for kind in BACKWARDS for chunk in range(chunks)}
    for index, action in enumerate(actions):
        here = f"rank {rank}, action {index}, {action_text(action)}"
        if not (0 <= action.chunk < chunks and 0 <= action.microbatch < microbatches and exists(action)):
            raise ScheduleError(f"{here}: there is no such thing in this pipeline")
        if action in done:
            raise ScheduleError(f"{here}: runs a second time")
        for kinds in BEFORE.get(action.kind, []):
            needed = [action._replace(kind=kind) for kind in kinds]
            if exists(needed[0]) and done.isdisjoint(needed):
                raise ScheduleError(f"{here}: needs {' or '.join(kinds)} before it")
        if action.kind in BACKWARDS and action.microbatch < newest[action.kind, action.chunk]:
            raise ScheduleError(f"{here}: comes after microbatch {newest[action.kind, action.chunk]}")
        if action.kind in BACKWARDS:
            newest[action.kind, action.chunk] = action.microbatch
        done.add(action)
    for chunk, microbatch in itertools.product(range(chunks), range(microbatches)):
        split = Action(BACKWARD_INPUT, chunk, microbatch) in done
        backward = [BACKWARD_INPUT, BACKWARD_WEIGHT] if split else [BACKWARD]
        for kind in [FORWARD, SEND_FORWARD, *([*backward, SEND_BACKWARD] if trains else [])]:
            action = Action(kind, chunk, microbatch)
            if exists(action) and action not in done:
                raise ScheduleError(f"rank {rank}: {kind} of chunk {chunk}, microbatch {microbatch} is missing")
