"""Adds to a schedule the actions that move tensors between stages.

Key idea: every rank's list is known, so every message is known too. Around what a rank computes come three kinds of
action in each direction: `recv_*` posts a receive, `wait_*` waits until it has come, `send_*` starts a send. Only
`wait_*` blocks. A receive is posted one action before the one that needs it, so that the message can travel while that
action computes.

Messages carry no address. Those of one direction between one pair of ranks form a lane, and a lane delivers in order:
the n-th receive posted gets the n-th message sent. That much is common to gloo and NCCL (which has no tags), and it is
enough, because both ends of a lane name its messages in the same order; `simulator.validate` proves it. With two stages
and several chunks the previous rank is also the next one; forward and backward are still separate lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Schedule

SEND_FORWARD, RECV_FORWARD, WAIT_FORWARD = "send_forward", "recv_forward", "wait_forward"
SEND_BACKWARD, RECV_BACKWARD, WAIT_BACKWARD = "send_backward", "recv_backward", "wait_backward"

# What each computing kind needs from a neighbouring stage, and what it gives to one.
RECEIVES = {FORWARD: RECV_FORWARD, BACKWARD: RECV_BACKWARD, BACKWARD_INPUT: RECV_BACKWARD}
WAITS = {FORWARD: WAIT_FORWARD, BACKWARD: WAIT_BACKWARD, BACKWARD_INPUT: WAIT_BACKWARD}
SENDS = {FORWARD: SEND_FORWARD, BACKWARD: SEND_BACKWARD, BACKWARD_INPUT: SEND_BACKWARD}
COMMUNICATION = frozenset([*RECEIVES.values(), *WAITS.values(), *SENDS.values()])


class Message(NamedTuple):
    """What crosses a stage boundary once: activations to the next global stage, or their gradients to the previous."""

    source: int  # global stages; stage s is on rank s % stages
    target: int
    microbatch: int


def message_of(action: Action, rank: int, stages: int, chunks: int) -> Message | None:
    """The message that an action in COMMUNICATION is about; None where the model has no stage at its other end."""
    here = action.chunk * stages + rank
    onward = 1 if action.kind.endswith("forward") else -1
    sends = action.kind in SENDS.values()
    source, target = (here, here + onward) if sends else (here - onward, here)
    if not 0 <= source < stages * chunks or not 0 <= target < stages * chunks:
        return None
    return Message(source, target, action.microbatch)


def lower(schedule: Schedule, stages: int, chunks: int) -> Schedule:
    """`schedule` with its receives, waits and sends. One stage with one chunk stays as it is."""
    assert len(schedule) == stages
    return [_lower_rank(actions, rank, stages, chunks) for rank, actions in enumerate(schedule)]


def _lower_rank(actions: list[Action], rank: int, stages: int, chunks: int) -> list[Action]:
    def communication(kinds: Mapping[str, str], action: Action) -> list[Action]:
        """What `kinds` names for `action`, if anything."""
        if action.kind not in kinds:
            return []
        named = action._replace(kind=kinds[action.kind])
        return [named] if message_of(named, rank, stages, chunks) else []

    lowered: list[Action] = []
    posted: set[Action] = set()
    for index, action in enumerate(actions):
        for near in actions[index : index + 2]:
            receive = communication(RECEIVES, near)
            if not posted.issuperset(receive) and not _is_answer(near, action):
                lowered += receive
                posted.update(receive)
        lowered += communication(WAITS, action)
        lowered.append(action)
        lowered += communication(SENDS, action)
    return lowered


def _is_answer(backward: Action, forward: Action) -> bool:
    """Whether the gradient that `backward` needs has the shapes of what `forward` is yet to compute."""
    return forward.kind == FORWARD and backward.kind != FORWARD and backward[1:] == forward[1:]
