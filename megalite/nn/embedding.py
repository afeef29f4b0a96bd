"""Vocabulary-parallel embedding table and learned positions.

Key idea: the rows are cut over the tensor-parallel ranks after padding to an even number; rows of padding are in no
box of the spec. The gradient is added row by row into the wide main gradient, without a dense temporary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megalite.distributed.collectives import reduce_from_group
from megalite.distributed.param_spec import DECOUPLED, Init, ParamSpec, replicated, vocabulary_rows
from megalite.nn.gradients import sink_of
from megalite.nn.module import Build, ShardedModule


class _Lookup(torch.autograd.Function):
    """table[ids]; the gradient goes to the table's sink where it has one."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.sink = sink_of(table)
        return table[ids.contiguous()]  # the result follows the strides of the indices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        table, ids = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        sink = ctx.sink
        target = torch.zeros_like(table) if sink is None else sink.target()
        rows = grads[0].reshape(-1, table.shape[1]).to(target.dtype)
        target.index_add_(0, ids.reshape(-1), rows)
        if sink is None:
            return target, None
        return None, None


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [...] of `table` [rows, hidden]: [..., hidden]."""
    return cast(Tensor, _Lookup.apply(table, ids))


def padded_vocabulary(vocab_size: int, divisor: int, tp: int) -> int:
    """Rows in memory: `vocab_size` rounded up to a multiple of divisor x tp, as Megatron-LM does."""
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple


def vocabulary_spec(build: Build, vocab_size: int, stages: tuple[int, ...] | None) -> ParamSpec:
    """Spec of a [vocabulary, hidden] table: the embedding or the output layer."""
    config, place = build.config, build.place(stages)
    padded = padded_vocabulary(vocab_size, config.make_vocab_size_divisible_by, place.tp)
    shape = (vocab_size, config.hidden_size)
    boxes = vocabulary_rows(shape, padded, place)
    local = (padded // place.tp, config.hidden_size)
    return ParamSpec(shape, local, boxes, Init(std=config.init_method_std), DECOUPLED, stages or ())


class VocabularyParallelEmbedding(ShardedModule):
    """Token ids to vectors. `stages`: the pipeline stages that hold a copy of the table (tied output layer)."""

    def __init__(self, build: Build, vocab_size: int, stages: tuple[int, ...] | None):
        super().__init__()
        self.group, self.scatter = build.mesh.tp, build.mesh.layout.sequence_parallel
        self.weight = self.add_parameter("weight", vocabulary_spec(build, vocab_size, stages), build)
        self.first_row = self.group.rank * self.weight.shape[0]

    def forward(self, ids: Tensor, *, whole: bool = False) -> Tensor:
        """`ids` int64 [s, b] → [s, b, hidden], equal on all ranks (or, if not `whole`, this rank's part of s)."""
        if self.group.size == 1:
            return lookup(self.weight, ids)
        local = ids - self.first_row
        here = (local >= 0) & (local < self.weight.shape[0])
        rows = lookup(self.weight, local.where(here, 0)).where(here.unsqueeze(-1), 0.0)
        return reduce_from_group(rows, self.group, sequence_parallel=self.scatter and not whole)


class PositionEmbedding(ShardedModule):
    """Learned absolute positions."""

    def __init__(self, build: Build):
        super().__init__()
        config = build.config
        shape = (config.max_position_embeddings, config.hidden_size)
        boxes = replicated(shape, build.place(), partial=build.mesh.layout.sequence_parallel)
        spec = ParamSpec(shape, shape, boxes, Init(std=config.init_method_std))
        self.weight = self.add_parameter("weight", spec, build)

    def forward(self, position_ids: Tensor) -> Tensor:
        """int64 [...] → [..., hidden]."""
        return lookup(self.weight, position_ids)
