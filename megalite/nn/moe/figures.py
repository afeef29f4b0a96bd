"""What a router counts on its own tokens in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.nn.moe.routing import Routing

SUMS = ("balance", "z", "entropy", "tokens", "dropped")


class LoadFigures:
    """Of a router and a step: choices by expert, and sums over this rank's tokens."""

    def __init__(self, experts: int, dtype: torch.dtype, device: torch.device):
        self.values = torch.zeros(experts + len(SUMS), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, routing: Routing, probabilities: Tensor, balance: Tensor, z: Tensor, counted: Tensor) -> None:
        """A micro-batch. The losses: times its number of samples. `counted` bool [n, 1]: tokens that aren't padding,
        whose `probabilities` are zeros."""
        experts, counts = len(self.values) - len(SUMS), counted.to(self.values.dtype)
        self.values.index_add_(0, routing.experts.flatten(), counts.expand_as(routing.experts).flatten())
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        dropped = balance.new_zeros(()) if routing.kept is None else (counted & ~routing.kept).sum()
        tokens = counts.sum()
        self.values[experts:] += torch.stack([balance, z, entropy, tokens, dropped]).to(self.values.dtype)
