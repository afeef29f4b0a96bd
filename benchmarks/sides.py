"""Sides that take turns, each in a process of its own.

Key idea: one side's allocator, threads and peak memory are nobody else's, and only one computes at a time. What can't
run becomes the note of its row.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from benchmarks.measure import Row, apart, reason, seconds
from benchmarks.workloads import Workload
from megalite.distributed.workers import end_with_parent

LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (2e-3, 2e-2)}
"""How far losses and gradient norms of equal models may be apart at the first step."""


class Steps(Protocol):
    """Takes the tokens [b, s + 1] of some steps, then makes the steps: loss and gradient norm."""

    def take(self, batches: Sequence[Tensor]) -> None: ...

    def step(self) -> tuple[float | Tensor, float | Tensor]: ...


class Answer(NamedTuple):
    """Of some steps: seconds in all, loss and gradient norm of the first, the most bytes that the process held."""

    seconds: float
    first: tuple[float, float]
    memory: int


class SideFailed(Exception):
    """Why a side can't run."""


class Side:
    """A process that makes `Steps` and waits for batches. `make` must be picklable."""

    def __init__(self, make: Callable[[], Steps], threads: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.peers"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, threads))
        self._process.start()
        theirs.close()

    def run(self, batches: list[Tensor]) -> Answer:
        """A step of each batch. Raises `SideFailed`."""
        try:
            self._connection.send(batches)
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise SideFailed(f"its process ended with status {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise SideFailed(answer)
        assert isinstance(answer, Answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def _serve(connection: Connection, make: Callable[[], Steps], threads: int) -> None:
    end_with_parent()
    torch.set_num_threads(threads)
    try:
        steps: Steps | None = None
        while True:
            batches = connection.recv()
            steps = steps or make()
            connection.send(_answer(steps, batches))
    except EOFError:
        return
    except Exception as error:
        connection.send(reason(error))


def _answer(steps: Steps, batches: list[Tensor]) -> Answer:
    numbers: list[tuple[float | Tensor, float | Tensor]] = []
    steps.take(batches)
    took = seconds(lambda: numbers.extend(steps.step() for _ in batches), torch.device("cpu"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    loss, norm = numbers[0]
    return Answer(took, (float(loss), float(norm)), peak)


class Turns(NamedTuple):
    """How often: rounds of some steps, on so many threads."""

    rounds: int
    steps: int
    threads: int


def take_turns(
    rows: Sequence[Row], makes: Sequence[Callable[[], Steps]], workload: Workload, dtype: str, args: Turns
) -> None:
    """Fill in the rows, of which the first is ours: rates and ratios of some rounds after one that warms up and checks
    that first losses and gradient norms agree with ours."""
    sides = {number: Side(make, args.threads) for number, make in enumerate(makes)}
    try:
        for turn in range(args.rounds + 1):
            batches = workload.batches(turn, args.steps)
            for number in sorted(sides, reverse=turn % 2 == 1):
                row = rows[number]
                try:
                    answer = sides[number].run(batches)
                    if turn == 0:
                        row.first = answer.first
                        check(row, rows[0], dtype)
                        continue
                except SideFailed as error:
                    row.note, row.rates = str(error), []
                    sides.pop(number).close()
                    continue
                row.rates.append(len(batches) * workload.tokens / answer.seconds)
                row.memory = answer.memory
    finally:
        for side in sides.values():
            side.close()
    for row in rows[1:]:
        if row.rates and rows[0].rates:
            row.compare("megalite / this", rows[0].rates, row.rates)


def check(row: Row, ours: Row, dtype: str) -> None:
    """That a side trains what ours trains. Raises `SideFailed`."""
    if row is ours or ours.first is None:
        return
    row.loss_apart, row.gradient_apart = apart(ours.first, row.first)
    limits = LIMITS[dtype]
    if row.loss_apart > limits[0] or row.gradient_apart > limits[1]:
        raise SideFailed(f"not measured: its loss or gradient norm isn't ours within {limits[0]:g} and {limits[1]:g}")
