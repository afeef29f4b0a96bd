"""Which tokens of its sequences a rank works on in a forward, and what they may see.

Key idea: nothing in a layer counts tokens by itself. The mask, the rotary table and the numbers that dropout is a
function of follow from the places of queries and keys in this one object, made once per forward. So other tokens on a
rank (a part of the sequence, the newest after a cache, virtual ones in front) are another way to make it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.mesh import Group


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens in generation."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[s, b, heads, d]` of this layer; return all so far."""
        ...


@dataclass(frozen=True)
class Places:
    """Places of n tokens in the sequences of a batch.

    `index` int64 [n]: counted from the sequence's first token; virtual tokens, where there are any, are the first
    `virtual` ones. `documents` int32 [b, n]: attention stays within equal ones; None: each sequence is one document.
    """

    index: Tensor
    documents: Tensor | None = None
    virtual: int = 0

    def slice(self, start: int, stop: int) -> Places:
        """From `start` until before `stop` of these."""
        documents = None if self.documents is None else self.documents[:, start:stop]
        return Places(self.index[start:stop], documents, self.virtual)

    def take(self, index: Tensor) -> Places:
        """Those at `index`, int64 [n]."""
        documents = None if self.documents is None else self.documents[:, index]
        return Places(self.index[index], documents, self.virtual)

    def after(self, count: int) -> Places:
        """These, and `count` virtual tokens before them."""
        index = torch.cat((torch.arange(count, device=self.index.device), self.index + count))
        return Places(index, None if self.documents is None else F.pad(self.documents, (count, 0)), count)


def visibility(queries: Places, keys: Places, window: int | None) -> Tensor:
    """Bool [b or 1, 1, queries, keys]: which keys each query sees: of its document, none after it, besides itself the
    `window` before it (None: all); and every virtual token before it."""
    distance = (queries.index - queries.virtual)[:, None] - (keys.index - keys.virtual)
    causal = distance >= 0
    visible = (causal if window is None else causal & (distance <= window))[None, None]
    if queries.documents is not None and keys.documents is not None:
        visible = visible & (queries.documents[:, None, :, None] == keys.documents[:, None, None, :])
    return visible | (causal & (keys.index < keys.virtual)) if keys.virtual else visible


def cumulative_lengths(document_ids: Tensor) -> Tensor:
    """int32 [documents + 1] borders of the documents of `document_ids` [b, s] laid end to end, from 0 to b·s."""
    batch, length = document_ids.shape
    starts = torch.ones(batch, length, dtype=torch.bool, device=document_ids.device)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    borders = starts.view(-1).nonzero().view(-1)
    return F.pad(borders, (0, 1), value=batch * length).to(torch.int32)


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """How many positions the sequence of each token reaches, int64 [b, s]: a sequence is a run of positions that grow
    by one, and what went before its first position is part of it (earlier tokens in a cache)."""
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1
    sequence = begins.cumsum(dim=1) - 1
    last = torch.zeros_like(position_ids).scatter_reduce(1, sequence, position_ids, "amax")
    return last.gather(1, sequence) + 1


class Sequences(NamedTuple):
    """The whole sequences of which a rank has some tokens: `places` of all their tokens, without virtual ones;
    `positions` int64 [b, s], with those of virtual tokens that pass through the layers."""

    places: Places
    positions: Tensor


@dataclass
class Auxiliary:
    """For auxiliary losses of a micro-batch in training. `scale`: what the mean loss of a sequence counts for.
    `counting`: figures are taken; not when something is computed again."""

    scale: Tensor | float
    counting: bool = True


@dataclass(frozen=True)
class Tokens:
    """What a forward knows of its s tokens besides the activations.

    `positions` int64 [b, s], or [1, s] where all sequences count alike. `queries`: their places. `keys`: the places of
    the keys that attention reads, where these aren't the tokens' own (a cache, a prefix). `group`: ranks over which
    activations between blocks are cut along s (sequence parallelism). `dropout_keys` int64 [b]: None in evaluation.
    `borders` int32: `cumulative_lengths` of the documents, for kernels that take no mask. `begins`: the sequences begin
    here; not so where earlier tokens are in the cache. `sequences`: None where this rank has all of them.
    `auxiliary`: None in evaluation. `lengths` int64 [b]: how many places of each sequence, virtual ones included, come
    before its padding; None: there is no padding.

    The model adds what is the same in all layers: `mask`, as `visibility` (None: the causal rule is all), and `rotary`,
    cosines and sines of the positions (None: nothing is rotated).
    """

    positions: Tensor
    queries: Places
    keys: Places | None = None
    group: Group | None = None
    dropout_keys: Tensor | None = None
    borders: Tensor | None = None
    cache: KeyValueCache | None = None
    begins: bool = True
    sequences: Sequences | None = None
    auxiliary: Auxiliary | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None

    @classmethod
    def whole(cls, positions: Tensor, documents: Tensor | None = None) -> Tokens:
        """All tokens of sequences, which begin here; in evaluation."""
        return cls(positions, Places(torch.arange(positions.shape[1], device=positions.device), documents))

    @classmethod
    def at(cls, index: Tensor | None, positions: Tensor, documents: Tensor | None = None) -> Tokens:
        """The tokens at `index` int64 [n] of sequences with `positions` and `documents` [b, s]; None: all. In
        evaluation."""
        whole = cls.whole(positions, documents)
        if index is None:
            return whole
        sequences = Sequences(whole.queries, positions)
        return cls(positions[:, index], whole.queries.take(index), sequences=sequences)

    def reaches(self) -> Tensor:
        """`sequence_lengths` of the whole sequences, for these tokens: int64 as `positions`."""
        if self.sequences is None:
            return sequence_lengths(self.positions)
        return sequence_lengths(self.sequences.positions)[:, self.queries.index]

    @property
    def causal_alone(self) -> bool:
        """Whether each token sees all tokens up to itself, and these are all keys."""
        return self.keys is None and self.queries.documents is None

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of `x` [s, ...] where activations between blocks are cut."""
        return x if self.group is None else x.chunk(self.group.size)[self.group.rank]

    @cached_property
    def index_between_blocks(self) -> Tensor:
        """Which tokens of the sequence this rank's activations between blocks are, int64."""
        return self.part(self.queries.index)

    @property
    def counted_between_blocks(self) -> Tensor | None:
        """Of these, for each sequence, which aren't padding: bool [n, b]; None: all."""
        return None if self.lengths is None else self.index_between_blocks[:, None] < self.lengths


@dataclass(frozen=True)
class VirtualTokens:
    """Trained vectors before the tokens of every sequence, which see them and whose positions count them (Li and Liang
    2021; Lester et al. 2021). `in_sequence`: they pass through the layers as tokens do; else they are keys and values
    of each layer."""

    count: int
    in_sequence: bool

    def before(self, tokens: Tokens) -> Tokens:
        """What a forward knows of `tokens` behind the virtual ones."""
        positions, queries = tokens.positions + self.count, tokens.queries
        sequences = tokens.sequences
        if sequences is not None:
            sequences = sequences._replace(positions=sequences.positions + self.count)
        keys = (queries if tokens.keys is None else tokens.keys).after(self.count)
        if not self.in_sequence:
            return replace(tokens, positions=positions, keys=keys, sequences=sequences)
        if not tokens.begins:  # they are in the cache
            queries = Places(queries.index + self.count, queries.documents, self.count)
            return replace(tokens, positions=positions, queries=queries, keys=keys)
        assert tokens.keys is None, "tokens in the sequence read their own keys"
        virtual = torch.arange(self.count, device=positions.device).expand(positions.shape[0], -1)
        positions = torch.cat((virtual, positions), dim=1)
        if sequences is not None:  # each rank has the virtual tokens, which see none of the others
            sequences = sequences._replace(positions=torch.cat((virtual, sequences.positions), dim=1))
        lengths = None if tokens.lengths is None else tokens.lengths + self.count
        return replace(tokens, positions=positions, queries=keys, sequences=sequences, lengths=lengths)
