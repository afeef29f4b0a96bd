"""Random numbers as a function: the published generator's numbers, slices of the whole, and closed-form statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.distributed import random

MASK = (1 << 64) - 1
Parts = tuple[int | str, ...]


def splitmix64(seed: int, count: int) -> list[int]:
    """Vigna's reference implementation, in Python integers."""
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def key(*parts: int | str) -> Tensor:
    return random.fold(7, *parts)


PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""The JDK's, Rosetta Code's and rand_xoshiro's first outputs for seed 1234567."""


@pytest.mark.parametrize("seed", [0, 1, 1234567, 0x9E3779B97F4A7C15, MASK])
def test_bits_are_the_upper_bits_of_splitmix64(seed: int) -> None:
    assert splitmix64(1234567, 5) == PUBLISHED
    ours = random.bits(torch.tensor(signed(seed)), torch.arange(1000)).tolist()
    assert ours == [output >> 11 for output in splitmix64(seed, 1000)]


def test_uniform_numbers_are_multiples_of_two_to_the_minus_53_in_the_unit_interval() -> None:
    numbers = random.uniform(key("u"), torch.arange(100_000))
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert torch.equal(numbers * 2.0**53, (numbers * 2.0**53).round())


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal, partial(random.keep_mask, drop=0.3)])
def test_a_slice_is_the_slice_of_the_whole(draw: Callable[[Tensor, Tensor], Tensor]) -> None:
    keys = random.fold(torch.arange(5), "site")[:, None]
    whole = draw(keys, torch.arange(1000))
    assert torch.equal(draw(keys[2:4], torch.arange(400, 700, 3)), whole[2:4, 400:700:3])
    grid = torch.arange(1000).view(20, 50)[3:7, 11:12]
    assert torch.equal(draw(keys[2], grid), whole[2].view(20, 50)[3:7, 11:12])


@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((1000,), (0,), (1000,)),
        ((1000,), (123,), (77,)),
        ((31, 17), (5, 3), (11, 9)),
        ((4, 6, 5, 8), (1, 2, 0, 0), (1, 3, 5, 8)),
        ((4, 6, 5, 8), (3, 5, 4, 7), (1, 1, 1, 1)),
        ((3, 5, 7), (0, 0, 6), (3, 5, 1)),
    ],
)
def test_filling_a_box_gives_that_box_of_the_whole(
    shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]
) -> None:
    whole = torch.empty(shape, dtype=torch.float64)
    random.fill_normal(whole, key("w"), 0.02, shape, (0,) * len(shape))
    box = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    contiguous = torch.empty(size, dtype=torch.float64)
    random.fill_normal(contiguous, key("w"), 0.02, shape, start)
    assert torch.equal(contiguous, box)
    room = torch.full([n + 2 for n in size], 9.0, dtype=torch.float64)
    inner = room[tuple(slice(1, 1 + n) for n in size)]
    assert len(shape) == 1 or inner.numel() == 1 or not inner.is_contiguous()
    random.fill_normal(inner, key("w"), 0.02, shape, start)
    assert torch.equal(inner, box)
    assert (room == 9.0).sum() == room.numel() - box.numel()


def test_filling_in_chunks_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = torch.empty(50, 30), torch.empty(50, 30)
    random.fill_normal(whole, key("w"), 1.0, (50, 30), (0, 0))
    monkeypatch.setattr(random, "_CHUNK", 64)
    random.fill_normal(pieces, key("w"), 1.0, (50, 30), (0, 0))
    assert torch.equal(whole, pieces)


def test_the_whole_tensor_is_filled_in_the_order_of_its_elements() -> None:
    filled = torch.empty(3, 5, 7, dtype=torch.float64)
    random.fill_normal(filled, key("w"), 2.0, (3, 5, 7), (0, 0, 0))
    expected = (random.normal(key("w"), torch.arange(105)) * 2.0).to(torch.float32).double()
    assert torch.equal(filled.view(-1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_starts_from_the_rounded_fp32_numbers(dtype: torch.dtype) -> None:
    wide, half, double = torch.empty(64, 33), torch.empty(64, 33, dtype=dtype), torch.empty(64, 33, dtype=torch.float64)
    for target in (wide, half, double):
        random.fill_normal(target, key("w"), 0.02, (64, 33), (0, 0))
    assert torch.equal(half, wide.to(dtype))
    assert torch.equal(double.to(torch.float32), wide)


COUNT = 1 << 19


def kolmogorov_distance(sample: Tensor, distribution: Tensor) -> float:
    """Largest distance between the empirical and the given distribution function, of a sorted sample."""
    steps = torch.arange(len(sample) + 1, dtype=torch.float64) / len(sample)
    return max((distribution - steps[:-1]).abs().max().item(), (steps[1:] - distribution).abs().max().item())


def normal_distribution(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("name", ["a", "decoder.layers.0.mlp.linear_fc1.weight"])
@pytest.mark.parametrize(
    ("draw", "distribution", "mean", "variance", "variance_of_the_variance"),
    [(random.uniform, lambda x: x, 0.5, 1 / 12, 1 / 180), (random.normal, normal_distribution, 0.0, 1.0, 2.0)],
    ids=["uniform", "normal"],
)
def test_numbers_follow_their_law(
    draw: Callable[[Tensor, Tensor], Tensor],
    distribution: Callable[[Tensor], Tensor],
    mean: float,
    variance: float,
    variance_of_the_variance: float,
    name: str,
) -> None:
    """Five standard deviations of each statistic; Kolmogorov's 1.95 / sqrt(n) is passed once in a thousand."""
    numbers = draw(key(name), torch.arange(COUNT)).sort().values
    assert numbers.isfinite().all()
    assert abs(numbers.mean().item() - mean) < 5 * math.sqrt(variance / COUNT)
    assert abs(numbers.var().item() - variance) < 5 * math.sqrt(variance_of_the_variance / COUNT)
    assert kolmogorov_distance(numbers, distribution(numbers)) < 1.95 / math.sqrt(COUNT)


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 0.999])
def test_a_mask_keeps_the_share_asked_for(drop: float) -> None:
    share = random.keep_mask(key("m"), torch.arange(COUNT), drop).double().mean().item()
    assert abs(share - (1 - drop)) <= 5 * math.sqrt(drop * (1 - drop) / COUNT)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("init", "layers.0.weight"), ("init", "layers.1.weight")),
        ((1, "site"), (2, "site")),
        ((0, 0), (0, 1)),
        ((0, 1), (1, 0)),
        (("a", "b"), ("b", "a")),
        (("x",), ("x",)),
    ],
)
def test_numbers_of_different_keys_or_places_are_uncorrelated(
    first: tuple[int | str, ...], second: tuple[int | str, ...]
) -> None:
    a, b = (random.normal(key(*parts), torch.arange(COUNT)) for parts in (first, second))
    for lag in (1, 2, 17) if first == second else (0, 1, 2, 17):
        correlation = torch.corrcoef(torch.stack((a[lag:], b[: COUNT - lag])))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_folding_many_samples_gives_distinct_keys_equal_to_one_at_a_time() -> None:
    keys = random.fold(1234, torch.arange(100_000), 3, "attention output")
    assert keys.unique().numel() == 100_000
    assert keys[777].item() == random.fold(1234, 777, 3, "attention output").item()
