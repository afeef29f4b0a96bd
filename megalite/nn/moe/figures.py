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
    def add(self, routing: Routing, probabilities: Tensor, balance: Tensor, z: Tensor) -> None:
        """A micro-batch. The losses: times its number of samples."""
        experts = len(self.values) - len(SUMS)
        chosen = routing.experts.flatten()
        self.values[:experts] += torch.bincount(chosen, minlength=experts)
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        dropped = balance.new_zeros(()) if routing.kept is None else (~routing.kept).sum()
        tokens = balance.new_full((), len(routing.experts))
        self.values[experts:] += torch.stack([balance, z, entropy, tokens, dropped]).to(self.values.dtype)
