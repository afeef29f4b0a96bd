"""Order of consumption: a function of consumed samples alone."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from megalite.data.sampler import Request, Sampler


def requests(
    length: int, start: int, micro: int, rank: int, size: int, count: int, seed: int | None = None
) -> list[Request]:
    sampler = Sampler(length=length, start_sample=start, micro_batch_size=micro, dp_rank=rank, dp_size=size, seed=seed)
    return list(islice(sampler, count))


def consumed(length: int, start: int, micro: int, size: int, steps: int, seed: int | None = None) -> np.ndarray:
    """Places in the dataset in the order of consumption, from all ranks."""
    ranks = [requests(length, start, micro, rank, size, steps, seed) for rank in range(size)]
    return np.concatenate([each.indices for step in zip(*ranks, strict=True) for each in step])


@pytest.mark.parametrize("start, micro, size", [(0, 1, 1), (0, 2, 4), (24, 4, 2), (96, 3, 4)])
def test_microbatch_k_of_rank_r_holds_megatrons_samples(start: int, micro: int, size: int) -> None:
    for rank in range(size):
        for k, request in enumerate(requests(1000, start, micro, rank, size, 5)):
            first = start + k * micro * size + rank * micro
            assert request.indices.tolist() == request.sample_ids.tolist() == list(range(first, first + micro))
            assert request.counted.all()


@pytest.mark.parametrize("seed", [None, 7])
def test_the_order_depends_on_neither_the_ranks_nor_where_a_run_stopped(seed: int | None) -> None:
    whole = consumed(50, 0, 1, 1, 240, seed)
    for micro, size in [(1, 2), (2, 1), (4, 3), (2, 6), (6, 4)]:
        for start in (0, 48, 96, 120):
            steps = 96 // (micro * size)
            assert (consumed(50, start, micro, size, steps, seed) == whole[start : start + 96]).all()


def test_single_goes_through_the_dataset_in_its_order_again_and_again() -> None:
    assert consumed(4, 0, 2, 2, 6).tolist() == [0, 1, 2, 3] * 6


def test_cyclic_shuffles_each_pass_anew_and_misses_nothing() -> None:
    passes = consumed(10, 0, 5, 1, 8, seed=3).reshape(4, 10)
    assert all(sorted(each) == list(range(10)) for each in passes.tolist())
    assert len({tuple(each) for each in passes.tolist()}) == 4
    assert consumed(10, 0, 5, 1, 8, seed=4).tolist() != passes.reshape(-1).tolist()
