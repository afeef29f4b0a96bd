"""Attention of sequences that are cut over context-parallel ranks.

Key idea: a softmax over all keys is the mean of softmaxes over blocks of them, weighted by their sums of exponentials
(Milakov and Gimelshein 2018). So a rank keeps its queries and attends the keys of one rank after another, as these come
round in a ring (Liu et al. 2023) or once all are gathered (Llama team 2024, section 3.3.2). In the backward the sums
over all keys are known, so each block's gradients are exact by themselves, and those of keys travel home.

Or ranks exchange heads for tokens, and each attends whole sequences with some of the heads (Jacobs et al. 2023). Both
compose: what an exchange of heads hands to its core are the tokens of a rank in a smaller ring.

Virtual tokens see only each other, so every rank has them and their keys by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed.collectives import (
    gather_sequence,
    start_all_gather,
    start_reduce_scatter,
    start_shift,
    transpose_over_ranks,
)
from megalite.distributed.context import by_rank, zigzag
from megalite.distributed.mesh import Group
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.attention_blocks import Block, BlockKernel, block_kernel
from megalite.nn.attention_core import CoreAttention
from megalite.nn.module import Build
from megalite.nn.tokens import Tokens, visibility


class _Exchange(ABC):
    """Brings the tensors of a group's members together, which are of one shape."""

    def __init__(self, group: Group):
        self.group = group

    @abstractmethod
    def visits(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each member's index and its tensor; this one's first. The next is on its way while one is worked on."""

    @abstractmethod
    def home(self, theirs: Iterator[Tensor]) -> Tensor:
        """The sum of what all members have for this one, where `theirs` is what it has for each of them, in the order
        of `visits`."""


class _Ring(_Exchange):
    """Each tensor goes from rank to rank, and so does what is summed up for its owner."""

    def visits(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.group.size):
            coming = None if step + 1 == self.group.size else start_shift(mine, self.group)
            yield (self.group.rank - step) % self.group.size, mine
            if coming is not None:
                mine = coming.wait()

    def home(self, theirs: Iterator[Tensor]) -> Tensor:
        coming = None
        for each in theirs:  # computed while the sum of the ranks before is on its way
            coming = start_shift(each if coming is None else coming.wait().add_(each), self.group)
        assert coming is not None
        return coming.wait()


class _Gathered(_Exchange):
    """All tensors at once."""

    def visits(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        coming = start_all_gather(mine[None], self.group)
        yield self.group.rank, mine
        everyone = coming.wait()
        for step in range(1, self.group.size):
            source = (self.group.rank - step) % self.group.size
            yield source, everyone[source]

    def home(self, theirs: Iterator[Tensor]) -> Tensor:
        parts = {(self.group.rank - step) % self.group.size: each for step, each in enumerate(theirs)}
        return start_reduce_scatter(torch.stack([parts[n] for n in range(self.group.size)]), self.group).wait()[0]


@dataclass(frozen=True)
class _Plan:
    """Which blocks of queries and keys a rank attends. `virtual`: how many keys are of virtual tokens, and how many
    queries. `mask`: bool [b or 1, 1, queries, keys], without virtual tokens, keys by rank; None: the causal rule."""

    exchange: _Exchange
    kernel: BlockKernel
    virtual: tuple[int, int]
    mask: Tensor | None
    dropped: Callable[[Tensor, Tensor, Tensor], Tensor]
    query_index: Tensor
    key_index: Tensor
    scale: float

    def of_virtual(self) -> Iterator[Block]:
        """Blocks of this rank's virtual keys."""
        keys, queries = self.virtual
        if queries:
            yield self._block(slice(0, queries), slice(0, keys), None, self.key_index[:keys], causal=True)
        if keys:
            yield self._block(slice(queries, None), slice(0, keys), None, self.key_index[:keys])

    def of_rank(self, source: int, length: int) -> Block:
        """The block of the `length` keys of a rank. Its chunks lie behind each other: those of an earlier rank before
        and after both of this rank's, those of a later one between them."""
        group, first = self.exchange.group, self.virtual[1]
        rows, columns = slice(first, None), slice(0, length)
        if source < group.rank:
            columns = slice(0, length // 2)
        elif source > group.rank:
            rows = slice(first + length // 2, None)
        mask = self.mask
        if mask is not None:
            mask = mask[:, :, rows.start - first :, source * length :][..., columns]
        index = zigzag(length * group.size, group.size, source, self.key_index.device) + self.virtual[0]
        return self._block(rows, columns, mask, index[columns], causal=source == group.rank and mask is None)

    def _block(self, rows: slice, columns: slice, mask: Tensor | None, keys: Tensor, causal: bool = False) -> Block:
        queries = self.query_index[rows]
        return Block(rows, columns, causal, mask, lambda weights: self.dropped(weights, queries, keys), self.scale)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.flatten(), value.flatten()))


class _Blockwise(torch.autograd.Function):
    """Queries [b, heads, queries, d], keys [b, groups, keys, d], values [b, groups, keys, e] → [b, heads, queries, e].
    All of a rank's own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, wide: torch.dtype) -> Tensor:
        batch, heads, queries, _ = query.shape
        # In memory as the result leaves, [queries, b, heads, e].
        out = torch.zeros(queries, batch, heads, value.shape[-1], dtype=wide, device=query.device).permute(1, 2, 0, 3)
        sums = torch.full((batch, heads, queries), float("-inf"), dtype=wide, device=query.device)

        def attend(block: Block, key: Tensor, value: Tensor) -> None:
            part, logs = plan.kernel.forward(query[:, :, block.rows], key, value, block)
            _merge(out[:, :, block.rows], sums[:, :, block.rows], part, logs)

        first = plan.virtual[0]
        for block in plan.of_virtual():
            attend(block, key[:, :, block.columns], value[:, :, block.columns])
        for source, packed in plan.exchange.visits(_packed(key[:, :, first:], value[:, :, first:])):
            theirs = _unpacked(packed, key, value, first)
            block = plan.of_rank(source, key.shape[2] - first)
            attend(block, *(each[:, :, block.columns] for each in theirs))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.plan, ctx.wide = plan, wide
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        plan, grad = ctx.plan, grads[0]
        query_grad, key_grad, value_grad = (torch.zeros_like(each, dtype=ctx.wide) for each in (query, key, value))

        def add(block: Block, key: Tensor, value: Tensor, key_grad: Tensor, value_grad: Tensor) -> None:
            rows = (each[:, :, block.rows] for each in (grad, query, out, sums))
            columns = block.columns
            of_query, of_key, of_value = plan.kernel.backward(*rows, key[:, :, columns], value[:, :, columns], block)
            query_grad[:, :, block.rows] += of_query
            key_grad[:, :, columns] += of_key
            value_grad[:, :, columns] += of_value

        first = plan.virtual[0]

        def theirs() -> Iterator[Tensor]:
            for source, packed in plan.exchange.visits(_packed(key[:, :, first:], value[:, :, first:])):
                pair = _unpacked(packed, key, value, first)
                total = torch.zeros_like(packed, dtype=ctx.wide)
                add(plan.of_rank(source, key.shape[2] - first), *pair, *_unpacked(total, key, value, first))
                yield total

        for block in plan.of_virtual():
            add(block, key, value, key_grad, value_grad)
        mine = _unpacked(plan.exchange.home(theirs()), key, value, first)
        key_grad[:, :, first:], value_grad[:, :, first:] = mine
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _unpacked(packed: Tensor, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Views of a pair that was packed, in the shapes of `key` and `value` without the `first` of their tokens."""
    shapes = [(*each.shape[:2], each.shape[2] - first, each.shape[3]) for each in (key, value)]
    of_keys, of_values = packed.split([torch.Size(shape).numel() for shape in shapes])
    return of_keys.view(shapes[0]), of_values.view(shapes[1])


def _merge(out: Tensor, sums: Tensor, part: Tensor, logs: Tensor) -> None:
    """Add a block to the weighted means `out` [..., e] and the logarithms `sums` [...] of the sums of exponentials. A
    query's first block must have a key that it sees."""
    total = torch.logaddexp(sums, logs)
    out.mul_((sums - total).exp()[..., None]).add_(part * (logs - total).exp()[..., None])
    sums.copy_(total)


class BlockwiseAttention(CoreAttention):
    """Attends the keys of the ranks of a ring, one rank after another."""

    def __init__(self, build: Build, backend: AttentionBackend):
        super().__init__(build, backend)
        self.exchange = (_Gathered if backend.gathers_keys else _Ring)(build.mesh.ring)
        self.kernel = block_kernel(backend.kernel, build.mesh.device, build.precision)

    def mask(self, tokens: Tokens) -> Tensor | None:
        if self.window is None and tokens.queries.documents is None:
            return None
        assert tokens.sequences is not None
        places, size = tokens.sequences.places, self.exchange.group.size
        order = by_rank(len(places.index), size, places.index.device)
        queries = tokens.queries.slice(tokens.queries.virtual, len(tokens.queries.index))
        return visibility(queries, places.take(order), self.window)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor:
        keys = tokens.keys or tokens.queries
        plan = _Plan(
            self.exchange,
            self.kernel,
            (keys.virtual, tokens.queries.virtual),
            tokens.mask,
            lambda weights, queries, keys: self.dropped(weights, tokens, layer, queries, keys),
            tokens.queries.index,
            keys.index,
            self.scale_of(q.shape[-1]),
        )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = cast(Tensor, _Blockwise.apply(q, k, v, plan, self.wide))
        return out.permute(2, 0, 1, 3).flatten(2)


class HeadExchange(CoreAttention):
    """Neighbouring ranks exchange heads for tokens, `core` attends, and its result is exchanged back."""

    def __init__(self, build: Build, backend: AttentionBackend, core: CoreAttention):
        super().__init__(build, backend)
        self.core, self.group, self.ring = core, build.mesh.heads, build.mesh.ring

    def _tokens(self, tokens: Tokens) -> Tokens:
        """What the core knows of the tokens of all ranks that exchange heads."""
        assert tokens.sequences is not None
        whole = tokens.sequences.places
        places = whole.take(zigzag(len(whole.index), self.ring.size, self.ring.rank, whole.index.device))
        queries = places.after(tokens.queries.virtual) if tokens.queries.virtual else places
        keys = None if tokens.keys is None else places.after(tokens.keys.virtual)
        return replace(tokens, queries=queries, keys=keys)

    def mask(self, tokens: Tokens) -> Tensor | None:
        return self.core.mask(self._tokens(tokens))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor:
        keys, queries = (tokens.keys or tokens.queries).virtual, tokens.queries.virtual
        order = by_rank((len(q) - queries) * self.group.size, self.group.size, q.device)
        repeats = max(1, self.group.size // k.shape[2])  # where ranks share a group, each gets it
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v)) if repeats > 1 else (k, v)
        q, k, v = (self._whole(x, n, order) for x, n in ((q, queries), (k, keys), (v, keys)))
        out = self.core(q, k, v, self._tokens(tokens), layer)
        # The group's tokens are those of a rank of the ring, in order: cut in the same way.
        parts = out[queries:][order].unflatten(0, (self.group.size, -1))  # of each rank's tokens
        mine = transpose_over_ranks(parts, self.group).permute(1, 2, 0, 3).flatten(2)
        if not queries:
            return mine
        virtual = gather_sequence(out[None, :queries], self.group).permute(1, 2, 0, 3).flatten(2)
        return torch.cat((virtual, mine))

    def _whole(self, x: Tensor, virtual: int, order: Tensor) -> Tensor:
        """`x` [tokens, b, heads, d] of this rank → [tokens, b, heads / size, d] of all ranks, in order, after the
        `virtual` ones, which each has by itself."""
        size = self.group.size
        parts = x[virtual:].unflatten(2, (size, -1)).movedim(2, 0)
        whole = transpose_over_ranks(parts, self.group).flatten(0, 1)[order.argsort()]
        if not virtual:
            return whole
        return torch.cat((x[:virtual].chunk(size, dim=2)[self.group.rank], whole))
