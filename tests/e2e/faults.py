"""The program with something going wrong in it: `python tests/e2e/faults.py FAULT FLAGS`.

FAULT is `name:rank:iteration`, e.g. `forward:1:3`: the forward of rank 1's third step raises; or several of these with
commas between. The program itself has no test mode; a fault replaces one of its functions before main is called.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


class Fault(RuntimeError):
    """What goes wrong."""


def main(fault: str | None, script: str = "pretrain_gpt") -> None:
    """Call the main function of the program `script` with a fault in place, or with none."""
    for each in fault.split(",") if fault is not None else ():
        name, rank, iteration = each.split(":")
        if int(rank) == int(os.environ.get("RANK", "0")):
            FAULTS[name](int(iteration))
    importlib.import_module(script).main()


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _at_step(iteration: int, method: str, action: Callable[[Any], None], *, after: bool = False) -> None:
    """Do `action(executor)` at a call of an executor's method during the step numbered `iteration` (from 1) of this
    process."""
    from megalite.training.executor import GPTExecutor

    count = 0

    def counting(begin: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += kwargs.get("dropout_key") is not None  # a step of training, not an evaluation
            return begin(self, *args, **kwargs)

        return replacement

    def acting(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            if count == iteration and not after:
                action(self)
            result = original(self, *args, **kwargs)
            if count == iteration and after:
                action(self)
            return result

        return replacement

    _replace(GPTExecutor, "begin", counting)
    _replace(GPTExecutor, method, acting)


def _raise(what: str) -> Callable[[Any], None]:
    def action(_: Any) -> None:
        raise Fault(f"{what} failed on purpose")

    return action


def _forward(iteration: int) -> None:
    _at_step(iteration, "forward", _raise("forward"))


def _backward(iteration: int) -> None:
    _at_step(iteration, "backward", _raise("backward"))


def _kill(iteration: int) -> None:
    _at_step(iteration, "forward", lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _sleep(iteration: int) -> None:
    """The rank hears no more of the others, as in a kernel that waits for a dead one."""
    _at_step(iteration, "forward", lambda _: time.sleep(1000))


def _slow(milliseconds: int) -> None:
    """Each forward of the rank takes so much longer."""
    from megalite.training.executor import GPTExecutor

    def slowed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            time.sleep(milliseconds / 1e3)
            return forward(*args, **kwargs)

        return replacement

    _replace(GPTExecutor, "forward", slowed)


def _held(iteration: int) -> None:
    """As `sleep`, in a library that lets no other thread of Python run."""
    _at_step(iteration, "forward", lambda _: ctypes.PyDLL(None).sleep(1000))


def _grace(seconds: int) -> None:
    """The watchdog leaves so long for stacks to be written."""
    import megalite.training.watchdog as watchdog

    watchdog.GRACE, watchdog._HELD = seconds, seconds / 2


def _starting(_: int) -> None:
    """The process dies when all have met and the first process group is made."""
    import torch.distributed as dist

    def dying(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)

    _replace(dist, "init_process_group", dying)


def _rendezvous(seconds: int) -> None:
    """The process waits so long for the others to come."""
    import megalite.distributed.launch as launch

    launch.RENDEZVOUS_SECONDS = seconds


def _failing_call(module: str, name: str, what: str) -> Callable[[int], None]:
    """A call of a module's function, told by its number, raises: in a data-loader worker where that is who calls."""

    def put(number: int) -> None:
        calls = itertools.count(1)

        def failing(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any) -> Any:
                if next(calls) == number:
                    raise Fault(f"{what} failed on purpose")
                return original(*args)

            return replacement

        _replace(importlib.import_module(module), name, failing)

    return put


def _measure(interval: int) -> None:
    """No fault: prints what the process uses each `interval` steps."""
    from megalite.training.trainer import Trainer
    from tests.e2e.test_long_run import usage

    def measuring(step: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any) -> Any:
            record = step(self)
            if record.iteration % interval == 0:
                print(f"measured {json.dumps(usage())}", flush=True)
            return record

        return replacement

    _replace(Trainer, "step", measuring)


def _value(value: float, where: str) -> Callable[[int], None]:
    """The gradient of this rank is this, or that is added to its loss, at one step."""

    def put(executor: Any) -> None:
        if where == "loss":
            executor.loss_sum += value
        else:
            next(executor.stages[0].parameters()).gradient_sink.target().view(-1)[7] = value

    return lambda iteration: _at_step(iteration, "backward", put, after=True)


FAULTS: dict[str, Callable[[int], None]] = {
    "forward": _forward,
    "backward": _backward,
    "kill": _kill,
    "sleep": _sleep,
    "slow": _slow,
    "held": _held,
    "grace": _grace,
    "starting": _starting,
    "rendezvous": _rendezvous,
    "data": _failing_call("megalite.data.loader", "stack_items", "reading"),
    "save": _failing_call("megalite.checkpoint.checkpoint", "owned_chunks", "saving"),  # of one rank alone
    "nan-gradient": _value(float("nan"), "gradient"),
    "inf-gradient": _value(float("inf"), "gradient"),
    "nan-loss": _value(float("nan"), "loss"),
    "spike": _value(1e4, "loss"),
    "measure": _measure,
}


if __name__ == "__main__":
    main(sys.argv.pop(1))
