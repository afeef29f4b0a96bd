"""Blends: the greedy order bit for bit, counts near the weights, and any positive weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.blend import (
    BlendedDataset,
    ConcatDataset,
    greedy_order,
    normalize,
    occurrence_index,
)

WEIGHTS: list[list[float]] = [
    [1],
    [30, 70],
    [0.001, 0.999],
    [1e-9, 1],
    [1, 1, 1],
    [3, 2, 2, 1],
    [2.0**-i for i in range(12)],
    [10.0**-i for i in range(9)] * 2,
    list(np.random.default_rng(0).random(40)),
    list(np.random.default_rng(1).pareto(0.5, 25)),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_order_and_samples_equal_megatron_cores(weights: list[float]) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    shares, size = normalize(weights), 30000
    assert greedy_order(shares, 0).tolist() == []
    members, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(members, samples, shares, len(shares), size, False)
    order = greedy_order(shares, size)
    np.testing.assert_array_equal(order, members)
    np.testing.assert_array_equal(occurrence_index(order), samples)


class Numbers:
    """Sample i is the number i, plus a base."""

    def __init__(self, base: int, length: int) -> None:
        self.base, self.length = base, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        assert 0 <= index < self.length
        return self.base + index


def test_a_member_that_is_drawn_too_often_starts_again(tmp_path: Path) -> None:
    blend = BlendedDataset([Numbers(0, 2), Numbers(100, 50)], [1, 1], 10, str(tmp_path), [])
    assert [blend[i] for i in range(10)] == [0, 100, 1, 101, 0, 102, 1, 103, 0, 104]
    again = pickle.loads(pickle.dumps(blend))
    assert [again[i] for i in range(10)] == [blend[i] for i in range(10)]


def test_the_order_is_kept_in_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        BlendedDataset([Numbers(0, 5), Numbers(100, 5)], [1, 2], 10, str(tmp_path), [])
        assert len(list(tmp_path.iterdir())) == 2
    BlendedDataset([Numbers(0, 5), Numbers(100, 5)], [1, 3], 10, str(tmp_path), [])
    assert len(list(tmp_path.iterdir())) == 4


def test_a_concatenation_holds_each_sample_once() -> None:
    both = ConcatDataset([Numbers(0, 3), Numbers(50, 0), Numbers(100, 2)])
    assert [both[i] for i in range(len(both))] == [0, 1, 2, 100, 101]
    for index in (-1, 5):
        with pytest.raises(IndexError):
            both[index]
