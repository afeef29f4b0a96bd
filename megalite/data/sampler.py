"""Which samples a microbatch holds, as a function of how many samples the run has consumed.

The key idea: the run consumes samples in one global order, numbered from 0. Microbatch k of data-parallel rank r of d,
counted from `start`, holds the numbers start + k*b*d + r*b + [0, b), as in Megatron-LM. Where training stopped and how
many ranks there were leaves no trace, so a run goes on at any data-parallel size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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


def fixed_permutation(size: int, key: Sequence[int]) -> np.ndarray:
    """A permutation of `size` places, a function of the key alone."""
    # RandomState: numpy promises that its permutations never change.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key))).permutation(size)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Yields the requests of one data-parallel rank, without end or until `total` samples are served over all ranks.

    length: samples in the dataset. seed: None for passes in the dataset's order (`single`); else each pass is shuffled
    by (seed, pass) alone (`cyclic`).
    """

    length: int
    start_sample: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seed: int | None = None
    total: int | None = None

    def __iter__(self) -> Iterator[Request]:
        step = self.micro_batch_size * self.dp_size
        first = self.start_sample
        stop = None if self.total is None else first + self.total
        key = [] if self.seed is None else [self.seed]
        order_of = functools.lru_cache(maxsize=1)(lambda which: fixed_permutation(self.length, [*key, which]))
        while stop is None or first < stop:
            numbers = first + self.dp_rank * self.micro_batch_size + np.arange(self.micro_batch_size, dtype=np.int64)
            counted = np.ones(len(numbers), dtype=bool) if stop is None else numbers < stop
            places = numbers % self.length
            if key:
                passes = (numbers // self.length).tolist()
                places = np.array([order_of(which)[n] for which, n in zip(passes, places, strict=True)], dtype=np.int64)
            yield Request(places, numbers, counted)
            first += step
