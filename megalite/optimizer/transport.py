"""The data-parallel collectives of the optimizer: reduce gradients, gather parameters.

Key idea: there are only three methods, so a test or a benchmark can replace them by a slow network. Each counts what a
rank sends, to be compared with formulas. Bytes are those of the bandwidth-optimal algorithms (each rank of d sends
(d - 1) / d of the tensor in a gather or a reduce-scatter, twice that in an all-reduce).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Group


class TimedPending:
    """A collective under way; `wait` returns once its result may be used. Until then its tensors must be left alone.

    `begin`, `end`: milliseconds of a monotonic clock. On CUDA `end` is when `wait` returned, on a CPU when the last
    byte was there.
    """

    def __init__(self, work: dist.Work, then: Callable[[], None] | None = None, *, on_cpu: bool = True):
        self._work, self._then = work, then
        self.begin, self.end = _now(), 0.0
        if on_cpu:
            work.get_future().add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self.end = _now()

    def wait(self) -> None:
        self._work.wait()
        self.end = self.end or _now()
        if self._then is not None:
            self._then()
            self._then = None


def _now() -> float:
    return time.perf_counter() * 1e3


class Transport:
    """Collectives over a group. All tensors are 1-D and contiguous. `bytes_sent`, `collectives`: what this rank has
    sent so far, and in how many."""

    def __init__(self) -> None:
        self.bytes_sent = self.collectives = 0

    def _count(self, tensor: Tensor, group: Group, rounds: int) -> None:
        self.bytes_sent += rounds * tensor.nbytes * (group.size - 1) // group.size
        self.collectives += 1

    def all_reduce(self, tensor: Tensor, group: Group) -> TimedPending:
        """Sum `tensor` over the ranks, in place."""
        self._count(tensor, group, 2)
        work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
        return TimedPending(work, on_cpu=not tensor.is_cuda)

    def reduce_scatter(self, result: Tensor, tensor: Tensor, group: Group) -> TimedPending:
        """This rank's part of the sum of `tensor` over the ranks, into `result`, which may be that part of `tensor`."""
        self._count(tensor, group, 1)
        if tensor.is_cuda:
            work = dist.reduce_scatter_single(result, tensor, group=group.process_group, async_op=True)
            return TimedPending(work, on_cpu=False)
        # Gloo's reduce-scatter moves as much as an all-reduce: exchange the parts, add them in the order of ranks.
        parts = torch.empty_like(tensor)
        work = dist.all_to_all_single(parts, tensor, group=group.process_group, async_op=True)
        return TimedPending(work, lambda: _sum_rows(parts.view(group.size, -1), result))

    def all_gather(self, result: Tensor, part: Tensor, group: Group) -> TimedPending:
        """The ranks' `part`s, one after another, into `result`; `part` may be this rank's part of it."""
        self._count(result, group, 1)
        work = dist.all_gather_single(result, part, group=group.process_group, async_op=True)
        return TimedPending(work, on_cpu=not result.is_cuda)


def _sum_rows(rows: Tensor, result: Tensor) -> None:
    torch.add(rows[0], rows[1], out=result)
    for row in rows[2:]:
        result.add_(row)
