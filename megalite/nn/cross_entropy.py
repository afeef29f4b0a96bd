"""The output layer together with its cross-entropy, so that only a chunk of the logits exists at a time.

Key idea: the logits of a chunk of tokens become their own gradient in place, and hidden states and weight get their
gradients from it before the next chunk comes. What a token's loss counts for is known by then (see
`training.executor`), so the forward does all of this, and the backward only hands it on. Vocabulary-parallel ranks each
have some of the columns; a maximum, a sum of exponentials and the target's logit of each token cross ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.distributed.collectives import all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.distributed.mesh import Group
from megalite.estimate.activations import logits_at_a_time
from megalite.nn.gradients import sink_of
from megalite.nn.pure import compiled
from megalite.precision.products import Factor, Products

_BLOCK = 1 << 19
"""How many logits of a chunk a CPU turns into gradients at a time: they stay in its caches."""


class OutputLoss(NamedTuple):
    """`tokens`: cross-entropy of each token in nats, wide, without a graph. `total`: their sum times the scale, wide
    []. A backward begins here and nowhere later, since gradients are formed for one of 1."""

    tokens: Tensor
    total: Tensor


@dataclass(frozen=True)
class OutputCrossEntropy:
    """How hidden states become losses. `group`: ranks that each hold rows of the table, of which the first `vocab_size`
    in all count. `sequence_parallel`: each brings its part of the sequence. `smoothing`: share of a target that is
    spread over the vocabulary (Szegedy et al. 2016). `compile`: pure functions are compiled."""

    group: Group
    vocab_size: int
    wide: torch.dtype
    sequence_parallel: bool
    smoothing: float
    compile: bool = False

    @cached_property
    def exponentials(self) -> Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]:
        return compiled(exponentials, self.compile)

    @cached_property
    def put_gradient(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        return compiled(put_gradient, self.compile)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, token_indices: Tensor | None, scale: Tensor | float
    ) -> OutputLoss:
        """`hidden` [s, b, h], `weight` [local rows, h], `targets` int64 [n], ids of the whole vocabulary. `scale`: what
        a token's loss counts for. `token_indices` int64 [n]: which of the s · b tokens, in order; None: all."""
        scale = torch.as_tensor(scale, dtype=self.wide, device=hidden.device)
        if torch.is_grad_enabled():
            losses, total = _OutputCrossEntropy.apply(hidden, weight, targets, token_indices, scale, self)
            return OutputLoss(losses, total)
        losses = _Pass(self, hidden, weight, targets, token_indices).losses(None)
        return OutputLoss(losses, losses.sum() * scale)


class _OutputCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_indices: Tensor | None,
        scale: Tensor,
        how: OutputCrossEntropy,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        work = _Pass(how, hidden, weight, targets, token_indices)
        if of_hidden:
            work.hidden_grad = torch.empty_like(work.hidden) if token_indices is None else torch.zeros_like(work.hidden)
        own_grad, sink = None, sink_of(weight)
        if of_weight and sink is None:
            own_grad = torch.zeros_like(weight)
        if of_weight:
            work.weight_grad = own_grad if sink is None else sink.target()
        losses = work.losses(scale)
        ctx.mark_non_differentiable(losses)
        ctx.save_for_backward(work.summed_hidden_grad(hidden.shape), own_grad)
        return losses, losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert grads[1].is_cuda or grads[1] == 1, "the gradients were formed for a total that isn't used further"
        return *ctx.saved_tensors, None, None, None, None


class _Pass:
    """One pass over the tokens. `hidden` [s · b, h]: the whole sequence. `hidden_grad`, `weight_grad`: what to put
    their gradients into, add them to; of all hidden states, with zeros for the tokens that don't count."""

    def __init__(
        self, how: OutputCrossEntropy, hidden: Tensor, weight: Tensor, targets: Tensor, token_indices: Tensor | None
    ):
        self.how, self.targets, self.token_indices = how, targets, token_indices
        self.columns = weight.shape[0]  # with padding: as many on all ranks, so that they cut tokens alike
        self.first = how.group.rank * self.columns
        self.matrix = weight[: max(0, min(how.vocab_size - self.first, weight.shape[0]))]
        self.hidden = (start_all_gather(hidden, how.group).wait() if how.sequence_parallel else hidden).flatten(0, 1)
        self.hidden_grad: Tensor | None = None
        self.weight_grad: Tensor | None = None

    def losses(self, scale: Tensor | None) -> Tensor:
        """Of each token, wide [n]. `scale` as above; None: no gradients."""
        tokens = len(self.targets)
        losses = torch.empty(tokens, dtype=self.how.wide, device=self.hidden.device)
        at_a_time = logits_at_a_time(tokens, self.columns) // self.columns
        buffer = self.hidden.new_empty(at_a_time, len(self.matrix))
        for part in _slices(tokens, len(buffer)):
            at = None if self.token_indices is None else self.token_indices[part]
            x = self.hidden[part] if at is None else self.hidden.index_select(0, at)
            logits = torch.mm(x, self.matrix.t(), out=buffer[: len(x)])
            self._losses_of(logits, self.targets[part], scale, losses[part])
            if self.hidden_grad is not None:
                self.hidden_grad[part if at is None else at] = logits @ self.matrix
            if self.weight_grad is not None:
                Products().add_weight_gradient(self.weight_grad[: len(self.matrix)], Factor(logits), Factor(x))
        return losses

    def summed_hidden_grad(self, shape: torch.Size) -> Tensor | None:
        """Over the ranks, of what this rank brought: `shape` [s, b, h]."""
        if self.hidden_grad is None:
            return None
        start = start_reduce_scatter if self.how.sequence_parallel else start_all_reduce
        return start(self.hidden_grad.view(-1, *shape[1:]), self.how.group).wait()

    def _losses_of(self, logits: Tensor, targets: Tensor, scale: Tensor | None, losses: Tensor) -> None:
        """Fill in the `losses` of rows of logits; with a `scale` these become the gradients of losses times it."""
        rows = len(logits)
        at_a_time = _BLOCK if self.how.group.size == 1 else 8 * _BLOCK  # ranks wait for each other after each
        for part in _slices(rows, rows if logits.is_cuda else max(1, at_a_time // self.columns)):
            losses[part] = self._turn(logits[part], targets[part] - self.first, scale)

    def _turn(self, logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
        """Losses of rows of logits, which are turned in place; `targets` count from this rank's first column."""
        how, (rows, columns) = self.how, logits.shape
        here = (targets >= 0) & (targets < columns)
        targets = targets.where(here, 0)[:, None]
        top = logits.new_full((rows, 1), float("-inf"), dtype=how.wide)
        if columns:
            top = logits.amax(dim=1, keepdim=True).to(how.wide)
        all_reduce(top, how.group, "max")
        # over this rank's columns: the target's logit, the sums of all logits (for smoothing) and of exponentials
        sums = top.new_zeros(3, rows)
        if columns:  # not times 0: another's column may be infinite
            sums[0] = (logits.gather(1, targets) - top).squeeze(1).where(here, 0.0)
        powers, sums[2], sums[1] = how.exponentials(logits, top, how.smoothing > 0)
        target, total, exponentials = all_reduce(sums, how.group)
        if scale is not None and columns:
            powers.scatter_add_(1, targets, (here * exponentials * (how.smoothing - 1.0))[:, None])
            spread = scale * (how.smoothing / how.vocab_size)
            how.put_gradient(logits, powers, (scale / exponentials)[:, None], spread)
        losses = exponentials.log() - target
        if not how.smoothing:
            return losses
        return (1.0 - how.smoothing) * losses + how.smoothing * (exponentials.log() - total / how.vocab_size)


def exponentials(logits: Tensor, top: Tensor, smoothing: bool) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logit - top), wide, the sums of these and of logit - top (if that is needed) of each row."""
    shifted = logits - top
    total = shifted.sum(dim=1) if smoothing else top.new_zeros(())
    powers = shifted.exp_()
    return powers, powers.sum(dim=1), total


def put_gradient(logits: Tensor, powers: Tensor, factor: Tensor, spread: Tensor) -> None:
    """The losses' gradient in place of the logits."""
    logits.copy_(powers.mul_(factor).sub_(spread))


def _slices(count: int, at_a_time: int) -> Iterator[slice]:
    return (slice(at, at + at_a_time) for at in range(0, count, max(1, at_a_time)))
