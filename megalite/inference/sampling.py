"""From logits to the next token: greedy, temperature, top-k, top-p.

Key idea: a draw is a function of (seed, prompt, step), as all random numbers here, so what a prompt becomes doesn't
depend on what else is in the batch. Probabilities are float64 whatever the model computes in, and a draw inverts their
cumulative sum in the vocabulary's order, which rounding can't reshuffle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed import random
from megalite.inference.options import GenerationOptions


def probabilities(logits: Tensor, options: GenerationOptions) -> Tensor:
    """Float64 [b, vocabulary] that sum to 1: what a token is drawn from, at a temperature above 0.

    Temperature, then top-k, then top-p of what is left. Among equal logits the smaller id comes first.
    """
    logits = logits.to(torch.float64)
    shifted = logits - logits.amax(dim=-1, keepdim=True)  # first, so that a tiny temperature divides no large number
    probability = (shifted / options.temperature).softmax(dim=-1)
    if options.top_k is None and options.top_p is None:
        return probability
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = probability.gather(-1, order)
    if options.top_k is not None:
        ordered[:, options.top_k :] = 0.0
        ordered /= ordered.sum(dim=-1, keepdim=True)
    if options.top_p is not None:
        mass_before = F.pad(ordered.cumsum(dim=-1)[:, :-1], (1, 0))
        ordered[mass_before >= options.top_p] = 0.0
        ordered /= ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(ordered).scatter_(-1, order, ordered)


def draw_tokens(probability: Tensor, uniform: Tensor) -> Tensor:
    """int64 [b]: the token at which the cumulative `probability` [b, vocabulary] passes `uniform` [b] in [0, 1)."""
    cumulative = probability.cumsum(dim=-1)
    cumulative = cumulative / cumulative[:, -1:]
    return torch.searchsorted(cumulative, uniform[:, None], right=True).squeeze(-1)


class TokenSampler:
    """Chooses one token per prompt and step. `indices`: what tells the prompts' draws apart. `unknown` int64: ids that
    are never chosen."""

    def __init__(
        self, options: GenerationOptions, indices: Sequence[int], device: torch.device, *, unknown: Tensor | None = None
    ) -> None:
        self.options = options
        self.unknown = None if unknown is None or not len(unknown) else unknown.to(device)
        self.keys = random.fold(options.seed, "generation", torch.tensor(indices, dtype=torch.int64)).to(device)

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """int64 [b] from `logits` [b, vocabulary]; `step` counts the new tokens from 0."""
        if self.unknown is not None:
            logits = logits.index_fill(-1, self.unknown, float("-inf"))
        if self.options.greedy:
            return logits.argmax(dim=-1)
        uniform = random.uniform(self.keys, torch.tensor(step, device=self.keys.device))
        return draw_tokens(probabilities(logits, self.options), uniform)
