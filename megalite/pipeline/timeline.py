"""When each action of a pipeline ran: simulated, or measured by a run with `--timeline DIR`.

Key idea: both are the same data, so both are judged and drawn by the same code, and a measured run supplies the costs
with which a simulation predicts another schedule.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megalite.config.errors import UserError
from megalite.pipeline.lowering import COMMUNICATION, SENDS, WAITS, Message, message_of
from megalite.pipeline.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action

Costs = Callable[[int, Action], float]
"""How long an action of a rank takes; that of a send is how long its message travels. Any unit of time."""


class Span(NamedTuple):
    """One executed action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did, in order. All ranks read one clock."""

    ranks: list[list[Span]]

    @property
    def start(self) -> float:
        """When the first rank began."""
        return min(spans[0].start for spans in self.ranks if spans)

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return max(span.end for spans in self.ranks for span in spans) - self.start

    def bubble_shares(self) -> list[float]:
        """For each rank, the share of the makespan in which it computes nothing."""
        return [1 - sum(s.end - s.start for s in computing(spans)) / self.makespan for spans in self.ranks]

    @property
    def bubble_share(self) -> float:
        """Mean over the ranks."""
        return statistics.fmean(self.bubble_shares())

    def peak_live(self) -> list[int]:
        """For each rank, the most activations of (chunk, microbatch) that it held at once."""
        return [peak_live([span.action for span in spans]) for spans in self.ranks]


def computing(spans: list[Span]) -> list[Span]:
    """Without communication."""
    return [span for span in spans if span.action.kind not in COMMUNICATION]


def peak_live(actions: list[Action], sizes: Sequence[int] | None = None) -> int:
    """The most activations held at once: from a forward until the backward, or the weight gradient where it is split.
    A forward that has neither (evaluation) holds nothing. `sizes`: those of each chunk's activations; default 1."""
    freed = {action[1:] for action in actions if action.kind in (BACKWARD, BACKWARD_WEIGHT)}
    live = peak = 0
    for action in actions:
        count = (action.kind == FORWARD and action[1:] in freed) - (action.kind in (BACKWARD, BACKWARD_WEIGHT))
        live += count * (1 if sizes is None else sizes[action.chunk])
        peak = max(peak, live)
    return peak


def read_steps(directory: str | Path, stages: int | None = None) -> list[Timeline]:
    """The training steps in the `rank_N.jsonl` files of a run, in milliseconds.

    `stages`: pipeline stages of the run, where each has several ranks (tensor or data parallel): the first rank of each
    is read. Default: every file is a stage. The clocks of neighbouring ranks are aligned by the messages between them.
    Files that don't fit raise a UserError.
    """
    files = sorted(Path(directory).glob("rank_*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank_")))
    if not files:
        raise UserError(
            f"--timeline {directory}: there is no rank_N.jsonl; a run with --timeline {directory} writes it"
        )
    if stages is not None and len(files) % stages:
        raise UserError(f"--stages {stages} does not divide the {len(files)} files in {directory}")
    ranks = [_split_steps(_read_spans(file)) for file in files[:: len(files) // (stages or len(files))]]
    steps = [list(step) for step in zip(*ranks, strict=False)]  # a run that was stopped may end within a step
    shifts = _clock_shifts(steps)
    for step in steps:
        for rank, shift in enumerate(shifts):
            step[rank] = [Span(action, start + shift, end + shift) for action, start, end in step[rank]]
    return [Timeline(step) for step in steps]


def _clock_shifts(steps: list[list[list[Span]]]) -> list[float]:
    """What to add to each rank's times, so that all are on the first rank's clock: as in NTP, the fastest message from
    a rank to the next one is taken to be as fast as the fastest one back."""
    stages = len(steps[0]) if steps else 1
    fastest: dict[tuple[int, int], float] = {}  # by sending and receiving rank
    for step in steps:
        sent, arrived = _message_times(step, SENDS), _message_times(step, WAITS)
        for message in sent.keys() & arrived.keys():
            pair = message.source % stages, message.target % stages
            fastest[pair] = min(fastest.get(pair, math.inf), arrived[message] - sent[message])
    shifts = [0.0]
    for rank in range(1, stages):
        onward, back = fastest.get((rank - 1, rank)), fastest.get((rank, rank - 1))
        ahead = 0.0 if onward is None or back is None else (onward - back) / 2
        shifts.append(shifts[-1] - ahead)
    return shifts


def _message_times(step: list[list[Span]], kinds: Mapping[str, str]) -> dict[Message, float]:
    """When the sends or waits of a step ended, by message."""
    chunks = 1 + max((span.action.chunk for spans in step for span in spans), default=0)
    ends = {}
    for rank, spans in enumerate(step):
        for action, _, end in spans:
            message = message_of(action, rank, len(step), chunks) if action.kind in kinds.values() else None
            if message is not None:
                ends[message] = end
    return ends


def _read_spans(file: Path) -> list[Span]:
    spans = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            if "bucket" in entry:  # a collective of data parallelism, beside the schedule
                continue
            action = Action(entry["kind"], entry["chunk"], entry["microbatch"])
            spans.append(Span(action, entry["start_ms"], entry["end_ms"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file}:{number}: not an object with kind, chunk, microbatch, start_ms, end_ms ({error})"
            ) from None
    return spans


def _split_steps(spans: list[Span]) -> list[list[Span]]:
    """A step begins where an action of the step before comes again."""
    steps: list[list[Span]] = []
    seen: set[Action] = set()
    for span in spans:
        if not steps or span.action in seen:
            steps.append([])
            seen.clear()
        steps[-1].append(span)
        seen.add(span.action)
    return steps


def median_costs(steps: list[Timeline]) -> Costs:
    """The median time of each (rank, kind, chunk) over the microbatches of `steps`, for `simulate`; messages cost
    nothing. The cost of what wasn't measured is a UserError."""
    times: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for step in steps:
        for rank, spans in enumerate(step.ranks):
            for action, start, end in computing(spans):
                times[rank, action.kind, action.chunk].append(end - start)
    medians = {key: statistics.median(values) for key, values in times.items()}

    def costs(rank: int, action: Action) -> float:
        if action.kind in COMMUNICATION:
            return 0.0
        if (rank, action.kind, action.chunk) not in medians:
            raise UserError(
                f"the run has no {action.kind} of chunk {action.chunk} on rank {rank} to take the cost from"
            )
        return medians[rank, action.kind, action.chunk]

    return costs
