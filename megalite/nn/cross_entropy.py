"""Cross-entropy of vocabulary-parallel logits, with label smoothing (Szegedy et al. 2016).

Key idea: each rank reduces its columns to a maximum, a sum of exponentials and the target's logit; only those cross
ranks. Rows are worked in chunks in the wide dtype, so no wide copy of the logits ever exists, and the backward
recomputes the softmax from the saved logits and their log-sum-exp. Padded columns are left out before they get here.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Group

_CHUNK_ELEMENTS = 1 << 22


def _row_chunks(logits: Tensor) -> range:
    return range(0, logits.shape[0], max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1])))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        total: int,
        smoothing: float,
        group: Group,
        wide: torch.dtype,
    ) -> Tensor:
        rows, columns = logits.shape
        step = _row_chunks(logits).step
        local = targets - first
        here = (local >= 0) & (local < columns)
        local = local.where(here, 0)
        shape = (rows,)
        top = logits.new_full(shape, float("-inf"), dtype=wide)
        if columns:
            top = logits.amax(dim=1).to(wide)
        all_reduce(top, group, "max")
        # sums over this rank's columns: exponentials, the target's logit, all logits (for smoothing)
        sums = torch.zeros(3, rows, dtype=wide, device=logits.device)
        for at in _row_chunks(logits):
            part = slice(at, at + step)
            shifted = logits[part].to(wide) - top[part, None]
            if columns:
                picked = shifted.gather(1, local[part, None]).squeeze(1)
                sums[1, part] = picked.where(here[part], 0.0)  # not times 0: another's column may be infinite
            if smoothing:
                sums[2, part] = shifted.sum(dim=1)
            sums[0, part] = shifted.exp_().sum(dim=1)
        all_reduce(sums, group)
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - sums[2] / total)
        ctx.save_for_backward(logits, local, here, top + log_sum)
        ctx.smoothing, ctx.total = smoothing, total
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, log_sum = ctx.saved_tensors
        result = torch.empty_like(logits)
        step = _row_chunks(logits).step
        for at in _row_chunks(logits):
            part = slice(at, at + step)
            soft = (logits[part].to(log_sum.dtype) - log_sum[part, None]).exp_()
            if ctx.smoothing:
                soft -= ctx.smoothing / ctx.total
            if logits.shape[1]:
                weight = here[part].to(soft.dtype).mul_(ctx.smoothing - 1.0)
                soft.scatter_add_(1, local[part, None], weight[:, None])
            result[part] = soft.mul_(grads[0][part, None]).to(result.dtype)
        return result, None, None, None, None, None, None


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    first_column: int,
    vocab_size: int,
    group: Group,
    wide: torch.dtype,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of every token in nats, wide [...], equal on all ranks.

    `logits` [..., local columns]: this rank's columns of the logical vocabulary (none of padding), starting at
    `first_column`. `targets` int64 [...]: ids of the whole vocabulary.
    """
    flat = logits.reshape(targets.numel(), logits.shape[-1])
    args = (targets.reshape(-1), first_column, vocab_size, label_smoothing, group, wide)
    return cast(Tensor, _CrossEntropy.apply(flat, *args)).view(targets.shape)
