"""How well the factors of a linear layer fit into eight bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.precision.formats import FloatFormat
from megalite.precision.scaling import Quantized, amax_of


class Statistics:
    """Of one layer, by role. `largest`: wide [roles, 2], amax and scale. `counts`: float64 [roles, 3], numbers, those
    that became zero, those that were cut off."""

    def __init__(self, roles: int, like: Tensor):
        self.largest = like.new_zeros(roles, 2)
        self.counts = like.new_zeros(roles, 3, dtype=torch.float64)

    def forget(self, *roles: int) -> None:
        for role in roles:
            self.largest[role] = 0.0
            self.counts[role] = 0.0

    def add(self, role: int, x: Tensor, quantized: Quantized, target: FloatFormat) -> None:
        """`x` [m, k] has become `quantized`."""
        scale = quantized.scale
        seen = torch.stack([amax_of(x, scale.dtype), scale.max()])
        self.largest[role] = torch.maximum(self.largest[role], seen)
        zeros = ((quantized.data.view(torch.uint8) & 0x7F) == 0) & (x != 0)
        beyond = x.to(scale.dtype).abs() > quantized.scales() * target.limit
        numbers = zeros.new_full((), x.numel(), dtype=torch.float64)
        self.counts[role] += torch.stack([numbers, zeros.sum(), beyond.sum()])


def measures(largest: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """Of one role's row of both tables: amax, the largest scale of a block, and the shares of the numbers that became
    zero without being it, and that were beyond the format's largest."""
    (amax, scale), (numbers, zeros, beyond) = largest, counts
    shares = {"underflow": zeros / max(1.0, numbers), "saturated": beyond / max(1.0, numbers)}
    return {"amax": amax, "scale": scale} | shares
