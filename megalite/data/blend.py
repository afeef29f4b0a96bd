"""Blends: one order of samples over several corpora, in given proportions.

At every step the corpus whose realised share lags most behind its weight gives the next sample, as in Megatron-LM.

The key idea of the fast order: step k looks only at (k, counts so far), and two runs of the rule that start from
different counts soon meet. So the steps are cut into lanes that run side by side from guessed counts; a lane whose
guess differs from where its predecessor really ended runs again from there, until all fit. The result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.data.cache import MappedArrays
from megalite.data.document_mask import Item, SampleSource

# Samples built per member beyond its share, since the greedy order may draw a few more than weight * size.
SURPLUS = 0.005
BLEND_VERSION = 1
_LANE_STEPS = 2048


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights over their sum."""
    values = np.asarray(weights, dtype=np.float64)
    return [float(value) for value in values / values.sum()]


def member_sizes(num_samples: int, shares: Sequence[float]) -> tuple[list[int], list[int]]:
    """Samples (drawn, built) of each member for `num_samples` of a blend with normalised `shares`.

    Drawn is ceil(N * w); built is ceil(drawn * 1.005). As megatron-core, since a member's size decides its shuffle.
    """
    drawn = [math.ceil(num_samples * share) for share in shares]
    return drawn, [math.ceil(count * (1 + SURPLUS)) for count in drawn]


def greedy_order(shares: Sequence[float], size: int) -> np.ndarray:
    """Member that gives each sample, int16 [size]: at step k the first with the largest share * max(k, 1) - count.

    Sums in float64 exactly as megatron-core's `build_blending_indices`, so that ties fall alike.
    """
    weights = np.asarray(shares, dtype=np.float64)[:, None]
    lanes = max(1, -(-size // max(_LANE_STEPS, math.isqrt(size))))
    steps = -(-size // lanes)
    starts = np.arange(lanes, dtype=np.float64) * steps
    begin = _near_counts(weights, starts)
    end = np.empty_like(begin)
    picks = np.empty((lanes, steps), dtype=np.int16)
    stale = np.arange(lanes)
    while len(stale):
        end[:, stale], picks[stale] = _run_lanes(weights, starts[stale], begin[:, stale], steps)
        stale = 1 + np.flatnonzero((begin[:, 1:] != end[:, :-1]).any(axis=0))
        begin[:, stale] = end[:, stale - 1]
    return picks.reshape(-1)[:size]


def _near_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Whole counts that sum to k and lie near weight * k, [members, lanes]."""
    shares = weights * starts
    counts = np.floor(shares)
    rank = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (rank < starts - counts.sum(axis=0))


def _run_lanes(weights: np.ndarray, starts: np.ndarray, begin: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule itself, in all lanes at once: (counts at the end [members, lanes], picks int16 [lanes, steps])."""
    counts = begin.copy()
    picks = np.empty((steps, counts.shape[1]), dtype=np.int16)
    lane = np.arange(counts.shape[1])
    lag = np.empty_like(counts)
    for step in range(steps):
        np.multiply(weights, np.maximum(starts + step, 1.0), out=lag)
        lag -= counts
        chosen = lag.argmax(axis=0)
        picks[step] = chosen
        counts[chosen, lane] += 1
    return counts, picks.T


def occurrence_index(order: np.ndarray) -> np.ndarray:
    """How often each entry of `order` occurred before, int64 of the same length: the sample to take from its member."""
    by_member = np.argsort(order, kind="stable")
    counts = np.bincount(order)
    index = np.empty(len(order), dtype=np.int64)
    index[by_member] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index


@dataclass(frozen=True)
class BlendIndex(MappedArrays):
    """Of each sample of a blend its member, int16 [samples], and the number of the sample there, int64 [samples]."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray


class BlendedDataset:
    """Samples of several datasets in the greedy order. A member that is drawn more often than it is long starts again.

    weights: positive, one a member, in any scale. size: samples of the blend.
    """

    def __init__(
        self, members: Sequence[SampleSource], weights: Sequence[float], size: int, folder: str, notes: list[str]
    ) -> None:
        self.members = list(members)
        # Normalised here once more, as megatron-core does: the last bit of a share decides ties.
        shares = normalize(weights)
        key = {"version": BLEND_VERSION, "shares": [share.hex() for share in shares], "size": size}

        def build() -> BlendIndex:
            order = greedy_order(shares, size)
            return BlendIndex(order, occurrence_index(order))

        self.index = BlendIndex.cached(folder, f"blend-of-{len(self.members)}", key, build, notes)

    def __len__(self) -> int:
        return len(self.index.dataset_index)

    def __getitem__(self, index: int) -> Item:
        member = self.members[self.index.dataset_index[index]]
        return member[int(self.index.dataset_sample_index[index]) % len(member)]


class ConcatDataset:
    """Each sample of each member once, one member after the other: the whole of a split, for full validation."""

    def __init__(self, members: Sequence[SampleSource]) -> None:
        self.members = list(members)
        self._ends = np.cumsum([len(member) for member in self.members])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        return self.members[place][index - int(self._ends[place]) + len(self.members[place])]
