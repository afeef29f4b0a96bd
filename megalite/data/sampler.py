"""Which samples a microbatch holds, as a function of how many samples the run has consumed.

The key idea: the run consumes samples in one global order, numbered from 0. Microbatch k of data-parallel rank r of d,
counted from `start`, holds the numbers start + k*b*d + r*b + [0, b), as in Megatron-LM. Where training stopped and how
many ranks there were leaves no trace, so a run goes on at any data-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """The samples of one microbatch.

    indices: int64 [b], places in the dataset. sample_ids: int64 [b], numbers in the order of consumption.
    counted: bool [b], False for copies that only fill the last microbatch.
    """

    indices: np.ndarray
    sample_ids: np.ndarray
    counted: np.ndarray


class Sampler:
    """Yields the requests of one data-parallel rank, without end or until `total` samples are served over all ranks.

    length: samples in the dataset. seed: None for passes in the dataset's order (`single`); else each pass is shuffled
    by (seed, pass) alone (`cyclic`). Raises ValueError for sizes that make no sense.
    """

    def __init__(
        self,
        *,
        length: int,
        start_sample: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None = None,
        total: int | None = None,
    ) -> None:
        if length < 1 or micro_batch_size < 1 or start_sample < 0 or not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"no microbatches from {length} samples, start {start_sample}, micro batch {micro_batch_size}, "
                f"data-parallel rank {dp_rank} of {dp_size}"
            )
        self.length = length
        self.start_sample = start_sample
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.total = total

    def __iter__(self) -> Iterator[Request]:
        step = self.micro_batch_size * self.dp_size
        stop = None if self.total is None else self.start_sample + self.total
        first = self.start_sample
        passes = _Passes(self.length, self.seed)
        while stop is None or first < stop:
            numbers = first + self.dp_rank * self.micro_batch_size + np.arange(self.micro_batch_size, dtype=np.int64)
            counted = np.ones(len(numbers), dtype=bool) if stop is None else numbers < stop
            yield Request(passes.indices(numbers), numbers, counted)
            first += step


class _Passes:
    """Maps numbers in the order of consumption to places in the dataset; keeps the last pass's permutation."""

    def __init__(self, length: int, seed: int | None) -> None:
        self.length = length
        self.seed = seed
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        places = numbers % self.length
        if self.seed is None:
            return places
        passes = numbers // self.length
        for which in np.unique(passes):
            mine = passes == which
            places[mine] = self._permutation(self.seed, int(which))[places[mine]]
        return places

    def _permutation(self, seed: int, which: int) -> np.ndarray:
        if which != self._pass:
            self._pass = which
            # RandomState: numpy promises that its permutations never change.
            bits = np.random.MT19937(np.random.SeedSequence([seed, which]))
            self._order = np.random.RandomState(bits).permutation(self.length)
        return self._order
