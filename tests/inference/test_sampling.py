"""Draws follow the softmax; top-k and top-p keep what a brute-force search keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megalite.inference.options import GenerationOptions
from megalite.inference.sampling import TokenSampler, draw_tokens, probabilities

LOGITS = torch.tensor([[1.0, -2.0, 0.5, 3.0, 2.5, -1.0, 0.0, 2.9]])


def frequencies(logits: Tensor, options: GenerationOptions, draws: int) -> Tensor:
    """Share of each token among the draws of as many prompts with equal logits [1, vocabulary]."""
    chosen = TokenSampler(options, range(draws), torch.device("cpu")).choose(logits.expand(draws, -1), 0)
    return torch.bincount(chosen, minlength=logits.shape[1]) / draws


def smallest_set(probability: Tensor, mass: float) -> set[int]:
    """The fewest tokens whose probabilities sum to at least `mass`, by trying all sets of each size."""
    for size in range(1, len(probability) + 1):
        sets = itertools.combinations(range(len(probability)), size)
        best = max(sets, key=lambda tokens: sum(probability[token].item() for token in tokens))
        if sum(probability[token].item() for token in best) >= mass:
            return set(best)
    raise AssertionError("no set reaches the mass")


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.77, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float) -> None:
    full = LOGITS.double().softmax(-1)[0]
    kept = probabilities(LOGITS, GenerationOptions(temperature=1.0, top_p=top_p))[0]
    expected = smallest_set(full, top_p)
    assert set(kept.nonzero().flatten().tolist()) == expected
    tokens = sorted(expected)
    torch.testing.assert_close(kept[tokens], full[tokens] / full[tokens].sum(), rtol=1e-12, atol=0)


def test_top_p_includes_the_token_that_reaches_p_of_what_top_k_left_and_not_the_next() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    both = probabilities(logits, GenerationOptions(temperature=1.0, top_k=2, top_p=0.57))[0]  # 0.4 / 0.7 is more
    assert both.tolist() == [1.0, 0.0, 0.0, 0.0]
    level = torch.zeros(1, 4)  # a quarter each, without rounding
    for top_p, kept in ((0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        assert probabilities(level, GenerationOptions(temperature=1.0, top_p=top_p)).count_nonzero() == kept


@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 100])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    kept = probabilities(LOGITS, GenerationOptions(temperature=0.7, top_k=top_k))[0]
    likeliest = sorted(range(8), key=lambda token: -LOGITS[0, token].item())[:top_k]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[likeliest] = (LOGITS[0, likeliest].double() / 0.7).softmax(-1)
    torch.testing.assert_close(kept, expected, rtol=1e-12, atol=1e-300)


def test_equal_logits_are_cut_by_id() -> None:
    level = torch.zeros(1, 6, dtype=torch.bfloat16)
    assert probabilities(level, GenerationOptions(temperature=1.0, top_k=2))[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_top_1_is_greedy(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 300).to(dtype)  # in bf16 the largest often comes twice
    device = torch.device("cpu")
    greedy = TokenSampler(GenerationOptions(), range(50), device).choose(logits, 0)
    for temperature in (1e-3, 1.0, 1e9):
        options = GenerationOptions(temperature=temperature, top_k=1)
        assert torch.equal(TokenSampler(options, range(50), device).choose(logits, 3), greedy)
    tiny = GenerationOptions(temperature=1.0, top_p=1e-9)
    assert torch.equal(TokenSampler(tiny, range(50), device).choose(logits, 3), greedy)
    assert probabilities(LOGITS, GenerationOptions(temperature=1e-300))[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(temperature=1.0),
        GenerationOptions(temperature=2.5, seed=7),
        GenerationOptions(temperature=1.0, top_k=3),
        GenerationOptions(temperature=1.0, top_p=0.8),
    ],
)
def test_frequencies_follow_the_probabilities(options: GenerationOptions) -> None:
    draws, probability = 40_000, probabilities(LOGITS, options)[0]
    share, kept = frequencies(LOGITS, options, draws), probability > 0
    assert share[~kept].sum() == 0
    chi_square = (draws * (share[kept].double() - probability[kept]) ** 2 / probability[kept]).sum()
    assert chi_square < 30  # at most 7 degrees of freedom: passed by chance but for one in 10,000


def test_draws_of_steps_prompts_and_seeds_are_independent() -> None:
    level = torch.zeros(2000, 10)
    device = torch.device("cpu")
    options = GenerationOptions(temperature=1.0)
    sampler = TokenSampler(options, range(2000), device)
    draws = [
        sampler.choose(level, 0),
        sampler.choose(level, 1),
        TokenSampler(GenerationOptions(temperature=1.0, seed=5), range(2000), device).choose(level, 0),
        TokenSampler(options, range(1, 2001), device).choose(level, 0),
    ]
    for a, b in itertools.combinations(draws, 2):
        assert 120 < (a == b).sum() < 280  # a tenth agree by chance


def test_a_draw_inverts_the_cumulative_sum() -> None:
    probability = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)):
        assert draw_tokens(probability, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_the_last_draw_never_falls_off_the_end() -> None:
    probability = torch.full((1, 49), 1 / 49, dtype=torch.float64)  # whose sum rounds to less than 1
    assert draw_tokens(probability, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 48
