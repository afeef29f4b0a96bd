"""Random numbers as a function of a key and a global index.

Key idea: no generator, no stream. `uniform(key, index)` hashes its arguments, so a rank computes just the slice that it
needs, and the result depends neither on the layout nor on the order of execution nor on recomputation. Initialisation
and dropout both use it.

The hash is SplitMix64 (Steele, Lea, Flood 2014): element i of key k is the i-th output of the generator seeded with k.
Torch has no unsigned 64-bit arithmetic, but two's-complement products and sums have the same bits; only shifts need a
mask.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL2 = 0x94D049BB133111EB - (1 << 64)
_CACHED = 1 << 15  # numbers hashed at a time on a CPU
_CHUNK = 1 << 20  # elements filled at a time: bounds the int64 and float64 temporaries


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >>> bits), the shift being logical."""
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits, int64 in and out."""
    x = _shift_xor(x, 30) * _MUL1
    x = _shift_xor(x, 27) * _MUL2
    return _shift_xor(x, 31)


def fold(key: Tensor | int, *parts: Tensor | int | str) -> Tensor:
    """A new key from a key and what distinguishes the use: numbers, int64 tensors (broadcast) or names."""
    result = torch.as_tensor(key, dtype=torch.int64)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little", signed=True)
        result = _mix(_mix(result + _GOLDEN) ^ part)
    return result


def bits(key: Tensor, index: Tensor) -> Tensor:
    """53 random bits for every (key, index), as int64 in [0, 2^53). Both int64, broadcast."""
    return (_mix(key + (index + 1) * _GOLDEN) >> 11) & ((1 << 53) - 1)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """Float64 in [0, 1), a multiple of 2^-53, for every (key, index)."""
    return bits(key, index).to(torch.float64) * 2.0**-53


def normal(key: Tensor, index: Tensor) -> Tensor:
    """Standard normal float64 for every (key, index), by Box and Muller (1958)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(key, 2 * index)))
    return radius * torch.cos(2.0 * math.pi * uniform(key, 2 * index + 1))


def keep_mask(key: Tensor, index: Tensor, drop: float) -> Tensor:
    """True with probability 1 - drop for every (key, index)."""
    limit = int(drop * 2.0**53)
    key, index = torch.broadcast_tensors(key, index)
    if key.is_cuda or key.ndim == 0:
        return bits(key, index) >= limit
    # On a CPU by parts that stay in its caches: every step of the hash reads and writes all of it.
    result = torch.empty(key.shape, dtype=torch.bool)
    step = max(1, len(result) * _CACHED // max(1, result.numel()))
    for at in range(0, len(result), step):
        result[at : at + step] = bits(key[at : at + step], index[at : at + step]) >= limit
    return result


def fill_normal(target: Tensor, key: Tensor, std: float, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
    """Fill `target`, the rectangle at `start` of a tensor of `shape`, with its slice of that tensor's normal numbers.

    Computed in float64, rounded to float32 and then to the target's dtype: every precision starts from equal numbers.
    """
    _fill(target, key, lambda key, index: normal(key, index) * std, shape, start)


def fill_uniform(target: Tensor, key: Tensor, bound: float, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
    """As `fill_normal`, with numbers from -`bound` to `bound`."""
    _fill(target, key, lambda key, index: (2.0 * uniform(key, index) - 1.0) * bound, shape, start)


@torch.no_grad()
def _fill(
    target: Tensor,
    key: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    start: tuple[int, ...],
) -> None:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    key = key.to(target.device)
    columns = start[-1] + torch.arange(target.shape[-1], device=target.device)
    rows = torch.zeros(1, dtype=torch.int64, device=target.device)
    for size, begin, stride in zip(target.shape[:-1], start[:-1], strides[:-1], strict=True):
        span = (begin + torch.arange(size, device=target.device)) * stride
        rows = (rows[:, None] + span).reshape(-1)
    flat = target.view(-1, target.shape[-1]) if target.is_contiguous() else None
    step = max(1, _CHUNK // max(1, target.shape[-1]))
    filled = []
    for at in range(0, len(rows), step):
        values = draw(key, rows[at : at + step, None] + columns).to(torch.float32)
        if flat is not None:
            flat[at : at + step] = values.to(target.dtype)
        else:
            filled.append(values)
    if flat is None and filled:
        target.copy_(torch.cat(filled).view(target.shape))
