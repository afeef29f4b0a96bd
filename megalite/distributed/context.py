"""Which tokens of a sequence a context-parallel rank holds.

Key idea: a causal query at the end of a sequence has more to do than one at its beginning. So the sequence is cut into
two chunks for each rank, and rank r holds chunk r from the front and chunk r from the back: all have as much to do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag(length: int, ranks: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """The places of rank `rank`'s tokens of a sequence of `length` tokens, a multiple of 2 x `ranks`; in order, int64
    [length / ranks]. All of them where it is alone."""
    chunk, rest = divmod(length, 2 * ranks) if ranks > 1 else (0, 0)
    assert rest == 0, f"{length} tokens can't be cut into {2 * ranks} equal chunks"
    if ranks == 1:
        return torch.arange(length, device=device)
    starts = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


def by_rank(length: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """The places of the first rank's tokens, then of the second's, and so on: int64 [length]."""
    return torch.cat([zigzag(length, ranks, rank, device) for rank in range(ranks)])
