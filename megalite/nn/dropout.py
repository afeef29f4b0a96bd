"""Dropout as a function of its place (Srivastava et al. 2014).

Key idea: the mask is a hash of (sample, layer, site, global element), so it doesn't depend on which rank computes it,
in which order, or how often.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed import random
from megalite.nn.tokens import Tokens


class _ScaledMask(torch.autograd.Function):
    """x * scale where `keep` is, else 0, even where x is infinite. Keeps the mask as booleans."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x.where(keep, 0.0).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return grads[0].where(keep, 0.0).mul_(ctx.scale), None, None


def dropout(x: Tensor, drop: float, keys: Tensor, index: Tensor) -> Tensor:
    """Zero a share `drop` of `x` and scale the rest by 1 / (1 - drop).

    `keys` int64 (one per sample, folded with layer and site) and `index` int64 (element within the sample) broadcast
    to the shape of `x`.
    """
    if drop == 0.0:
        return x
    if drop >= 1.0:
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
    keep = random.keep_mask(keys, index, drop)
    return cast(Tensor, _ScaledMask.apply(x, keep, 1.0 / (1.0 - drop)))


def hidden_dropout(x: Tensor, drop: float, tokens: Tokens, layer: int, site: str) -> Tensor:
    """Dropout on `x` [s, b, h], activations between blocks; none in evaluation."""
    if tokens.dropout_keys is None or drop == 0.0:
        return x
    width = x.shape[-1]
    index = (tokens.index_between_blocks[:, None] * width + torch.arange(width, device=x.device))[:, None, :]
    return dropout(x, drop, random.fold(tokens.dropout_keys, layer, site)[None, :, None], index)
