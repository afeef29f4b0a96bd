"""A pool of worker processes that run functions as the ranks of a layout.

Key idea: starting a process and importing torch costs seconds, a function call in a running one milliseconds. So torch
is imported once, by a server from which the workers are forked (multiprocessing's `forkserver`), and the workers stay,
with one default process group over all of them; a layout of n ranks runs on the first n, and each worker keeps the
meshes that it has made. A call that fails or hangs takes the workers down, never the caller: the error holds
the failing rank's traceback or every rank's stack, and the next call starts new workers.

Only for processes of one machine, on CPUs, with gloo. A worker can't start processes through `multiprocessing` itself
(data-loader workers), so that it never leaves orphans.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import GROUP_AXES, Mesh
from megalite.distributed.workers import end_with_parent

_ADDRESS = "127.0.0.1"
_START_TIMEOUT = 300.0  # seconds; eight imports of torch on a busy machine of one core
_NEVER = timedelta(days=1)  # collectives don't time out by themselves: the caller's timeout collects stacks first
_DUMP_SECONDS = 5.0  # how long stacks may take to arrive
_GRACE_SECONDS = 0.2  # how long to wait for a worker's death to show


class WorkerError(RuntimeError):
    """A function raised on a worker, or its process died. `rank`: the first that did; `text`: its traceback."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank, self.text = rank, text


class WorkerTimeout(RuntimeError):
    """A call took too long. `stacks`: the Python stacks of all threads of every rank that had not finished."""

    def __init__(self, seconds: float, stacks: dict[int, str]):
        ranks = ", ".join(map(str, stacks))
        dumps = "\n".join(f"--- rank {rank}\n{text.strip()}" for rank, text in stacks.items())
        super().__init__(f"no answer from ranks {ranks} after {seconds:g} s\n{dumps}")
        self.seconds, self.stacks = seconds, stacks


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    stack_file: Path


class ProcessPool:
    """`size` workers with `threads` CPU threads each, started by the first call. Not for use from several threads.

    `preload`: modules that all workers need, imported once, before they are forked.
    """

    def __init__(self, size: int = 8, threads: int = 1, preload: Sequence[str] = ("megalite.distributed.pool",)):
        self.size, self.threads, self.preload = size, threads, list(preload)
        self._workers: list[_Worker] = []
        self._layouts: set[Layout] = set()  # whose groups exist
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        layout: Layout | None = None,
    ) -> list[Any]:
        """Call `function` on workers 0 to `world_size` - 1; their results in the order of ranks.

        With a `layout` of `world_size` ranks the function gets its rank's `Mesh` before `args`. Function (by its
        module's name), arguments and results are pickled; tensors travel by value. `timeout` in seconds, without the
        start of workers. Raises `WorkerError` or `WorkerTimeout`; the workers are then replaced by the next call.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size}: the pool has {self.size} workers")
        if layout is not None and layout.world_size != world_size:
            raise ValueError(f"world_size {world_size}: the layout has {layout.world_size} ranks")
        call = pickle.dumps(partial(_call, function, args, layout))
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        try:
            if layout is not None and layout not in self._layouts:
                self._send(pickle.dumps(partial(_make_groups, layout)), self.size)
                self._collect(self.size, timeout)
                self._layouts.add(layout)
            self._send(call, world_size)
            return self._collect(world_size, timeout)
        except BaseException:
            # The others may be inside a collective that never ends; an interrupt leaves answers that nobody awaits.
            self.close()
            raise

    def close(self) -> None:
        """End the workers. The pool stays usable: the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        self._layouts.clear()
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # The store picks a free port and lives here, so that it outlives any worker.
        self._store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="megalite-pool-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self.preload)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                stack_file = Path(self._folder.name, f"stack-{rank}.txt")
                args = (rank, self.size, self.threads, self._store.port, theirs, stack_file)
                process = context.Process(target=_work, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()  # so that a worker's death ends its pipe
                self._workers.append(_Worker(process, ours, stack_file))
            self._collect(self.size, _START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def _send(self, message: bytes, world_size: int) -> None:
        for worker in self._workers[:world_size]:
            worker.connection.send_bytes(message)

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        """One answer of each of the first workers."""
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        results: list[Any] = [None] * world_size
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerTimeout(timeout, self._stacks(sorted(waiting.values())))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    good, value = False, "its process ended"
                if not good:
                    raise self._failure(rank, value)
                results[rank] = value
        return results

    def _failure(self, rank: int, text: str) -> WorkerError:
        """A worker that died is the cause of what others say about a lost connection."""
        time.sleep(_GRACE_SECONDS)
        for other, worker in enumerate(self._workers):
            code = worker.process.exitcode
            if code is not None:
                note = f"its process ended with exit code {code}"
                return WorkerError(other, note if other == rank else f"{note}; rank {rank} then said:\n{text}")
        return WorkerError(rank, text)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """What each rank's threads are doing."""
        for rank in ranks:
            process = self._workers[rank].process
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_SECONDS
        texts: dict[int, str] = {}
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, texts = texts, {rank: _read(self._workers[rank].stack_file) for rank in ranks}
            if all(texts.values()) and texts == before:
                break
        return texts


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class _State:
    """What a worker keeps between calls. Layouts share the process groups of equal ranks."""

    def __init__(self) -> None:
        self.meshes: dict[Layout, Mesh] = {}
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # also those without this worker

    def mesh(self, layout: Layout) -> Mesh:
        if layout not in self.meshes:
            self.meshes[layout] = Mesh(layout, dist.get_rank(), torch.device("cpu"), self.groups)
        return self.meshes[layout]


def _work(rank: int, size: int, threads: int, port: int, connection: Connection, stack_file: Path) -> None:
    """A worker's life: join the others, then serve messages until the pool goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's business
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        end_with_parent()
        state = _State()
        _answer(connection, partial(_join, rank, size, threads, port))
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            _answer(connection, partial(_execute, message, state))


def _join(rank: int, size: int, threads: int, port: int) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name may not resolve
    torch.set_num_threads(threads)
    store = dist.TCPStore(_ADDRESS, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_NEVER)


def _answer(connection: Connection, compute: Callable[[], Any]) -> None:
    """Send (True, result) or (False, traceback)."""
    try:
        # Plain pickle, not multiprocessing's: tensors by value instead of handles to this process's memory.
        answer = pickle.dumps((True, compute()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)


def _execute(message: bytes, state: _State) -> Any:
    return pickle.loads(message)(state)


def _make_groups(layout: Layout, state: _State) -> None:
    """Make a layout's groups, on all workers: torch names a group by counting, so all must count alike."""
    for axes in GROUP_AXES:
        for ranks in layout.groups(*axes):
            if len(ranks) > 1 and ranks not in state.groups:
                state.groups[ranks] = dist.new_group(list(ranks), timeout=_NEVER)


def _call(function: Callable[..., Any], args: tuple[Any, ...], layout: Layout | None, state: _State) -> Any:
    return function(*args) if layout is None else function(state.mesh(layout), *args)
