"""Attention of a block of keys, from which the attention of all keys is put together.

Key idea: a kernel also returns the logarithm of each query's sum of exponentials. In the backward it gets that of all
keys, and the whole result, instead: a block's weights and gradients follow from them (Dao et al. 2022).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.nn.attention_core import of_equal_width
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class Block:
    """Which of the queries (`rows`) attend which of some keys (`columns`). `causal`: they are the same tokens, each
    sees those up to itself. `mask` bool [b or 1, 1, rows, columns]: what they see; None: all. `dropped`: dropout of
    weights [b, groups, heads of a group, rows, columns]. `scale`: what multiplies the products of queries and keys."""

    rows: slice
    columns: slice
    causal: bool
    mask: Tensor | None
    dropped: Callable[[Tensor], Tensor]
    scale: float


class BlockKernel(ABC):
    """Queries [b, heads, rows, d], keys [b, groups, columns, d], values [b, groups, columns, e]."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """The block's attention [b, heads, rows, e], and logarithms of the sums of exponentials, wide [b, heads, rows];
        of a query that sees none of the keys, any finite numbers and -inf."""

    @abstractmethod
    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, sums: Tensor, key: Tensor, value: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where `grad`, `out` and `sums` are of the attention of all keys."""


class PlainBlocks(BlockKernel):
    """Plain products, in any dtype; the only ones with dropout."""

    def __init__(self, wide: torch.dtype):
        self.wide = wide

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, block)
        sums = scores.logsumexp(dim=-1)
        weights = block.dropped(self._weights(scores, sums).to(query.dtype))
        return (weights @ value.unsqueeze(2)).flatten(1, 2), sums.flatten(1, 2)

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, sums: Tensor, key: Tensor, value: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, groups = block.scale, (key.shape[1], -1)
        weights = self._weights(self._scores(query, key, block), sums.unflatten(1, groups))
        grad, query, out = (each.unflatten(1, groups) for each in (grad, query, out))
        value_grad = (block.dropped(weights.to(query.dtype)).transpose(-1, -2) @ grad).sum(dim=2)
        of_weights = block.dropped(grad @ value.unsqueeze(2).transpose(-1, -2))
        mean = (grad.to(self.wide) * out).sum(dim=-1, keepdim=True)
        of_scores = (weights * (of_weights - mean)).to(query.dtype)
        query_grad = ((of_scores @ key.unsqueeze(2)) * scale).flatten(1, 2)
        return query_grad, (of_scores.transpose(-1, -2) @ (query * scale)).sum(dim=2), value_grad

    def _scores(self, query: Tensor, key: Tensor, block: Block) -> Tensor:
        """Wide [b, groups, heads of a group, rows, columns], -inf where a key isn't seen."""
        query = query.unflatten(1, (key.shape[1], -1)) * block.scale
        scores = (query @ key.unsqueeze(2).transpose(-1, -2)).to(self.wide)
        mask = None if block.mask is None else block.mask.unsqueeze(2)
        if block.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill_(~mask, float("-inf"))

    @staticmethod
    def _weights(scores: Tensor, sums: Tensor) -> Tensor:
        return (scores - sums.masked_fill(sums == float("-inf"), 0.0)[..., None]).exp_()


class CpuBlocks(BlockKernel):
    """Torch's flash attention for CPUs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        padded = of_equal_width(query, key, value)
        scale, bias = block.scale, _bias(block.mask, query.dtype)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attend(*padded, 0.0, block.causal, attn_mask=bias, scale=scale)
        if block.mask is not None:
            sums = sums.masked_fill(~block.mask.any(dim=-1), float("-inf"))
        return out[..., : value.shape[-1]], sums

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, sums: Tensor, key: Tensor, value: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, bias = block.scale, _bias(block.mask, query.dtype)
        padded = of_equal_width(query, key, value)
        grad, out = (F.pad(each, (0, padded[0].shape[-1] - each.shape[-1])) for each in (grad, out))
        sums = sums.transpose(1, 2).contiguous().transpose(1, 2)  # as the forward lays them out
        of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = of(grad, *padded, out, sums, 0.0, block.causal, attn_mask=bias, scale=scale)
        query_grad, key_grad, value_grad = (
            each[..., : old.shape[-1]] for each, old in zip(grads, (query, key, value), strict=True)
        )
        return query_grad, key_grad, value_grad


class CudaBlocks(BlockKernel):
    """Flash attention in half precision, else torch's memory-efficient kernel; without masks and dropout."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        assert block.mask is None
        padded, scale = self._repeated(query, key, value), block.scale
        if query.dtype in (torch.bfloat16, torch.float16):
            result = torch.ops.aten._scaled_dot_product_flash_attention(*padded, 0.0, block.causal, scale=scale)
        else:
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            result = attend(*padded, None, True, 0.0, block.causal, scale=scale)
        return result[0][..., : value.shape[-1]], result[1][..., : query.shape[2]]  # rows may be padded

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, sums: Tensor, key: Tensor, value: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._repeated(query, key, value)
        grad, out = (F.pad(each, (0, q.shape[-1] - each.shape[-1])) for each in (grad, out))
        scale, rows, columns = block.scale, query.shape[2], key.shape[2]
        none = torch.empty(2, dtype=torch.int64, device=grad.device)  # of the dropout's generator
        if query.dtype in (torch.bfloat16, torch.float16):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *(grad, q, k, v, out, sums.contiguous(), None, None, rows, columns, 0.0, block.causal, none, none),
                scale=scale,
            )
        else:
            sums = F.pad(sums, (0, -rows % 32))
            grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                *(grad, q, k, v, None, out, sums, none[0], none[1], 0.0, [True, True, True, False], block.causal),
                scale=scale,
            )[:3]
        query_grad, *of_groups = (
            each[..., : old.shape[-1]] for each, old in zip(grads, (query, key, value), strict=True)
        )
        key_grad, value_grad = (each.unflatten(1, (key.shape[1], -1)).sum(dim=2) for each in of_groups)
        return query_grad, key_grad, value_grad

    @staticmethod
    def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With as many keys and values as heads, and of equal width."""
        times = query.shape[1] // key.shape[1]
        return of_equal_width(query, *(each.repeat_interleave(times, dim=1) for each in (key, value)))


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def block_kernel(kernel: str, device: torch.device, precision: Precision) -> BlockKernel:
    """For the `kernel` of an `AttentionBackend`."""
    if kernel == "unfused" or (precision.wide == torch.float64 and device.type == "cuda"):
        return PlainBlocks(precision.wide)
    return CudaBlocks() if device.type == "cuda" else CpuBlocks()
