"""Signals that end a run between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from megalite.config.schema import TrainingConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.training import signals
from megalite.training.signals import StopRequests
from tests.e2e.runs import wait_for


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopRequests]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopRequests(TrainingConfig(exit_signal_handler=True), single_process_mesh())
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_a_save_and_another_after_it_ends_at_once(
    first: signal.Signals,
    second: signal.Signals,
    stops: StopRequests,
    exits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(signals._ONE_REQUEST, second, 0.0)
    assert stops.reason(1) is None
    os.kill(os.getpid(), first)
    wait_for(lambda: stops.received == first)
    assert exits == []
    assert stops.reason(1) == f"received {first.name}"
    os.kill(os.getpid(), second)
    wait_for(lambda: exits == [128 + second])


def test_one_request_that_comes_twice_is_one(stops: StopRequests, exits: list[int]) -> None:
    """A launcher passes on what the process's group got as well."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    wait_for(lambda: stops.received == signal.SIGTERM)
    threading.Event().wait(0.1)
    assert exits == []
