"""Microbatches in the order of `sampler`, read ahead by worker processes.

The key idea: workers decide nothing. Which samples come next is decided in the training process; a worker
reads the ones named in a request and sends arrays back. It draws no random number, and the loader's own come from a
private generator, so the training process's random state never depends on whether there is a loader.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megalite.config.errors import UserError
from megalite.data.document_mask import Item, SampleSource
from megalite.data.microbatch import Microbatch, stack_items, with_ahead
from megalite.data.packing import trim
from megalite.data.sampler import Request, Sampler
from megalite.distributed.workers import end_with_parent, signals_blocked

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def telling_killed_workers() -> Iterator[None]:
    """Raise a UserError where a loader's worker is killed while the block runs. Torch raises for that in a handler of
    SIGCHLD, so in the middle of whatever the main thread is at."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(f"{error}; a killed worker often means too little memory: try --num-workers 0") from error


class MicrobatchIterator(Iterator[Microbatch]):
    """Microbatches of one data-parallel rank from the sample numbered `start_sample` on.

    `close()` ends the workers; so does the end of a `with` block.

    dataloader_type: `single` (or None) reads the dataset in its order, again and again; `cyclic` shuffles each pass,
    a function of (seed, pass). total: stop after this many samples over all ranks; the last microbatches are filled
    with copies whose loss mask is all False, so that every rank gets equally many. None: without end. trim_multiple:
    cut each microbatch after its last place that counts, at a multiple of this; None: all have the dataset's length.
    ahead: depths of multi-token prediction, whose tokens and labels are added.

    Workers start when the first microbatch is asked for: after all that can fail while a run is put together. A mistake
    in the data raises UserError with its own message; any other failure in a worker a RuntimeError with the worker's
    traceback.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        start_sample: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int,
        seed: int,
        dataloader_type: str | None = "single",
        total: int | None = None,
        trim_multiple: int | None = None,
        pin_memory: bool = False,
        ahead: int = 0,
    ) -> None:
        if len(dataset) == 0:
            raise UserError("the dataset has no samples")
        sampler = Sampler(
            length=len(dataset),
            start_sample=start_sample,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=seed if dataloader_type == "cyclic" else None,
            total=total,
        )
        self._pin_memory = pin_memory
        self._loader: DataLoader[Any] | None = DataLoader(
            _Reader(dataset, trim_multiple, ahead),
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_unchanged,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),
        )
        self._batches: Iterator[Item | _Failure] | None = None

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> Microbatch:
        if self._loader is None:
            raise ValueError("this iterator is closed")
        if self._batches is None:
            with signals_blocked(*_STOP_SIGNALS):  # in the workers from their first moment on: they inherit it
                self._batches = iter(self._loader)
        batch = next(self._batches)
        if isinstance(batch, _Failure):
            raise batch.error()
        microbatch = Microbatch.from_arrays(batch)
        return microbatch.pin_memory() if self._pin_memory else microbatch

    def close(self) -> None:
        """End the workers and wait for them."""
        batches, self._batches, self._loader = self._batches, None, None
        # Torch offers no public way; without it workers live until the garbage collector comes by.
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        for worker in getattr(batches, "_workers", ()):
            worker.kill()  # one that still reads: it ignores the SIGTERM with which torch would end it

    def __enter__(self) -> MicrobatchIterator:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Failure:
    """An exception on its way from a worker, as text: the exception itself may not survive pickling."""

    message: str
    trace: str
    of_user: bool

    def error(self) -> Exception:
        if self.of_user:
            return UserError(self.message)
        return RuntimeError(f"reading a sample failed: {self.message}\n{self.trace}")


class _Reader(Dataset[Any]):
    """Answers requests with stacked numpy arrays. Arrays travel through a pipe: no /dev/shm to run out of."""

    def __init__(self, dataset: SampleSource, trim_multiple: int | None, ahead: int) -> None:
        self.dataset, self.trim_multiple, self.ahead = dataset, trim_multiple, ahead

    def __getitem__(self, request: Request) -> Item | _Failure:
        try:
            arrays = stack_items([self.dataset[int(index)] for index in request.indices], request.sample_ids)
        except Exception as error:
            message = str(error) or type(error).__name__
            return _Failure(message, traceback.format_exc(), isinstance(error, UserError | OSError))
        arrays["loss_mask"] &= request.counted[:, None]
        if self.trim_multiple is not None:
            arrays = trim(arrays, self.trim_multiple)
        return with_ahead(arrays, self.ahead) if self.ahead else arrays


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Keep terminal, launcher and system signals away from a worker: the training process decides when it ends, and
    when that dies, so does the worker. (Torch's own watchdog only ends the main thread, and one that writes to a full
    pipe stays for ever.)"""
    os.setsid()  # a signal to the training process's group doesn't come here
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # where workers aren't forked, they inherit no mask
    end_with_parent()
    torch.set_num_threads(1)
