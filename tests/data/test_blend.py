"""Blends: the greedy order bit for bit, counts near the weights, and any positive weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.blends import parse_blend
from megalite.config.errors import UserError
from megalite.data.blend import (
    BlendedDataset,
    ConcatDataset,
    greedy_order,
    member_sizes,
    normalize,
    occurrence_index,
)


def slow_order(shares: list[float], size: int) -> list[int]:
    counts = [0] * len(shares)
    order = []
    for step in range(size):
        lags = [share * max(step, 1) - count for share, count in zip(shares, counts, strict=True)]
        order.append(lags.index(max(lags)))
        counts[order[-1]] += 1
    return order


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
@pytest.mark.parametrize("size", [1, 2, 1000, 20001])
def test_the_order_is_the_greedy_rules(weights: list[float], size: int) -> None:
    shares = normalize(weights)
    assert greedy_order(shares, size).tolist() == slow_order(shares, size)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_order_and_samples_equal_megatron_cores(weights: list[float]) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    shares, size = normalize(weights), 30000
    members, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(members, samples, shares, len(shares), size, False)
    order = greedy_order(shares, size)
    np.testing.assert_array_equal(order, members)
    np.testing.assert_array_equal(occurrence_index(order), samples)


@pytest.mark.parametrize("weights", [[30, 70], [0.001, 0.999], [1e-9, 1]])
def test_counts_are_within_one_of_the_weights(weights: list[float]) -> None:
    shares = normalize(weights)
    counts = np.bincount(greedy_order(shares, 1000), minlength=2)
    assert (abs(counts - 1000 * np.array(shares)) <= 1).all()


def test_an_order_of_no_samples() -> None:
    assert len(greedy_order([1.0], 0)) == len(occurrence_index(greedy_order([1.0], 0))) == 0


@pytest.mark.parametrize(
    "words, prefixes, weights",
    [
        (["p"], ("p",), None),
        (["p", "q"], ("p", "q"), None),
        (["p", "q", "r"], ("p", "q", "r"), None),
        (["30", "p", "70", "q"], ("p", "q"), (30.0, 70.0)),
        (["1", "p"], ("p",), (1.0,)),
        (["1e-9", "p", ".5", " q "], ("p", "q"), (1e-9, 0.5)),
        (["0", "p", "1", "q"], ("q",), (1.0,)),
    ],
)
def test_blends_are_parsed(words: list[str], prefixes: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    blend = parse_blend(words, "--data-path")
    assert (blend.prefixes, blend.weights) == (prefixes, weights)


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "empty"),
        (["30", "p", "70"], "30 p 70: write only prefixes"),
        (["p", "30", "q"], "p 30 q: write"),
        (["30", "p", "q", "70"], "write only prefixes, or WEIGHT PREFIX"),
        (["30", "40", "70", "q"], "write only"),
        (["-1", "p", "1", "q"], "none negative"),
        (["nan", "p", "1", "q"], "finite"),
        (["inf", "p", "1", "q"], "finite"),
        (["0", "p", "0", "q"], "not all 0"),
    ],
)
def test_bad_blends_are_refused_by_flag_and_item(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_blend(words, "--train-data-path")
    assert "--train-data-path" in str(caught.value)


def test_parsing_agrees_with_megatron_core() -> None:
    utils = pytest.importorskip("megatron.core.datasets.utils")
    for words in (["p"], ["p", "q"], ["30", "p", "70", "q"], ["1", "p"]):
        blend = parse_blend(words, "--data-path")
        prefixes, weights = utils.get_blend_from_list(words)
        assert list(blend.prefixes) == list(prefixes)
        assert (None if blend.weights is None else list(blend.weights)) == weights


@pytest.mark.parametrize("size, shares", [(1000, [0.3, 0.7]), (7, [1 / 3, 2 / 3]), (10**9, [1e-9, 1 - 1e-9])])
def test_members_are_sized_as_in_megatron_core(size: int, shares: list[float]) -> None:
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    drawn, built = member_sizes(size, shares)
    assert [[each] for each in drawn] == builder._get_size_per_split_per_dataset(shares, [size])
    assert [[each] for each in built] == builder._get_size_per_split_per_dataset(shares, [size], surplus=0.005)


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
