"""Checkpoints saved while training goes on, or waits.

Key idea: a save is four steps: plan, stage, write, commit. Only staging, a copy into memory of the host, needs the
model to stand still. So in the background a thread does the rest, with a process group of its own, since collectives of
two threads in one group would meet the wrong partners. All ranks look at the end of a step whether all their threads
are done, so they hear of its end, or its failure, at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import Planned, write_and_commit
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.planner import Chunk
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Group, Mesh

_ALIGNMENT = 64  # bytes: staged tensors begin at multiples of this


class Staging:
    """Memory of the host that tensors are copied into, the same from save to save. Page-locked beside a GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with what they hold now. The copies are good until the next call."""
        sizes = [torch.Size(chunk.sizes).numel() * chunk.dtype.itemsize for chunk in chunks]
        steps = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        if len(self._memory) < sum(steps):
            pinned = self._device.type == "cuda"
            self._memory = torch.empty(sum(steps), dtype=torch.uint8, pin_memory=pinned)
        result, offset = [], 0
        for chunk, size, step in zip(chunks, sizes, steps, strict=True):
            copy = self._memory[offset : offset + size].view(chunk.dtype).view(chunk.sizes)
            copy.copy_(chunk.read(), non_blocking=True)
            result.append(replace(chunk, read=partial(_given, copy)))
            offset += step
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return result


def _given(tensor: Tensor) -> Tensor:
    return tensor


Job = Callable[[Group], object]
"""What is left to do of a save once the model may change again. Collective over the group, which has all ranks."""


class Saver:
    """Does what saves leave to be done: at once, or in the background, one job after the other. `say`: prints a line on
    the first rank. All methods are collective over the world."""

    def __init__(self, mesh: Mesh, say: Callable[[str], None], *, background: bool):
        self._mesh, self._say = mesh, say
        self._group = mesh.twin_of_world() if background else mesh.world
        self._staging = Staging(mesh.device)
        self._thread = ThreadPoolExecutor(1, "saver") if background else None
        self._jobs: deque[tuple[Future[object], str]] = deque()

    def save(self, planned: Planned) -> None:
        """Write a checkpoint; in the background, once those before it are complete. Raises their error."""
        if self._thread is not None:
            self.wait()
            planned = replace(planned, chunks=self._staging.copy(planned.chunks))
        self.submit(partial(write_and_commit, planned), f"saved {planned.target}")

    def submit(self, job: Job, done: str) -> None:
        """Do a job, and say `done`. What it reads may not change until then."""
        if self._thread is None:
            job(self._group)
            self._say(done)
        else:
            self._jobs.append((self._thread.submit(job, self._group), done))

    def poll(self) -> None:
        """Tell of the jobs that all ranks have done by now; raise the error of one that failed."""
        if not self._jobs:
            return
        for job, _ in self._jobs:
            if job.done() and not isinstance(job.exception(), CheckpointError | None):
                job.result()  # this rank failed alone, and the others wait for it
        done = torch.tensor(sum(job.done() for job, _ in self._jobs), device=self._mesh.device)
        self._finish(int(all_reduce(done, self._mesh.world, "min").item()))

    def wait(self) -> None:
        """Return once no job is left; raise the error of one that failed."""
        self._finish(len(self._jobs))

    def _finish(self, count: int) -> None:
        for _ in range(count):
            job, done = self._jobs.popleft()
            job.result()
            self._say(done)
