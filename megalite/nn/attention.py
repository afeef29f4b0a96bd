"""Self-attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023), cut by heads over ranks.

Key idea: heads are projected and rotated, a core attends, and the result is projected back. What the heads are made of
is one class, the core another (`nn.attention_backend`); each takes the widths of queries, keys and values from what it
gets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import start_all_gather
from megalite.distributed.mesh import Group
from megalite.distributed.param_spec import Init, grouped_qkv
from megalite.nn.attention_core import CoreAttention
from megalite.nn.linear import ColumnParallelLinear, RowParallelLinear
from megalite.nn.module import Build, ShardedModule
from megalite.nn.norm import Norm
from megalite.nn.rotary import Rotation
from megalite.nn.tokens import Tokens


class SelfAttention(ShardedModule, ABC):
    """Projection to heads, attention, projection back. `prefix`: puts keys and values before those of the tokens.

    A subclass makes `linear_proj`, from all heads' values to the hidden size, and sets `cache_shapes`: [groups, width]
    of the two tensors that a cache keeps of a token on this rank. These are its keys and values, unless `expand` makes
    keys and values from them.
    """

    linear_proj: RowParallelLinear
    cache_shapes: tuple[tuple[int, int], tuple[int, int]]

    def __init__(self, build: Build, core: CoreAttention, layer: int):
        super().__init__()
        self.core, self.layer, self.recompute = core, layer, build.recompute
        self.prefix: nn.Module | None = None

    @abstractmethod
    def project(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [s, b, h] → of the whole s this rank's rotated queries [s, b, heads, d], and what a cache keeps: rotated
        keys [s, b, groups, d] and values [s, b, groups, e]."""

    def expand(self, kept: tuple[Tensor, Tensor], tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Keys and values from what a cache keeps of all tokens so far."""
        return kept

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`x` [s, b, h] → [s, b, h], with sequence parallelism this rank's part of s."""
        q, k, v = self.project(x, tokens)
        if self.prefix is not None and tokens.begins:  # later a cache has it
            k, v = self.prefix(k, v)
        if tokens.cache is not None:
            k, v = tokens.cache.update(self.layer, k, v)
        k, v = self.expand((k, v), tokens)
        return self.linear_proj(self.recompute.run("core_attn", self.core, q, k, v, tokens, self.layer), tokens)


class _SumOnFirst(torch.autograd.Function):
    """The identity on [s, b, 1, queries + key + value, d]. In the backward the gradients of a key and value of which
    `share` neighbours in `group` have copies are summed on the first of them; the others get zeros."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, share: int, group: Group) -> Tensor:
        ctx.share, ctx.group = share, group
        return fused.view_as(fused)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, rank, share = grads[0].clone(), ctx.group.rank, ctx.share
        parts = start_all_gather(grad[..., -2:, :][None], ctx.group).wait()
        grad[..., -2:, :] = parts[rank : rank + share].sum(0) if rank % share == 0 else 0.0
        return grad, None, None


class GroupedQueryAttention(SelfAttention):
    """Queries share keys and values in groups. Queries and keys may be normalised.

    The fused projection is laid out as [groups, queries of a group + key + value, head], an order that knows no layout,
    so any cut by groups is a plain slice. With more ranks than groups each group's key and value are copied to the
    ranks that share its queries. Each then has a part of their gradient. In FP8 a rounded sum isn't the sum of rounded
    parts, so there the parts are summed first.
    """

    def __init__(self, build: Build, core: CoreAttention, layer: int):
        super().__init__(build, core, layer)
        config, place = build.config, build.place()
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        queries = heads // groups
        self.rotate = Rotation(interleaved=config.rotary_interleaved, compile=build.compile)
        self.group = build.mesh.tp
        self.share = place.tp // groups if build.precision.fp8 is not None else 1  # ranks that sum a key's gradients
        local_groups = max(1, groups // place.tp)
        self.local_queries = heads // place.tp // local_groups  # of a group on this rank
        self.cache_shapes = (local_groups, width), (local_groups, width)
        shape = (groups, queries + 2, width, config.hidden_size)
        self.local_shape = (local_groups, self.local_queries + 2, width)
        bias_boxes = None
        if config.add_bias_linear or config.add_qkv_bias:
            bias_boxes = grouped_qkv(groups, queries, (width,), place)
        self.linear_qkv = ColumnParallelLinear(
            build,
            shape,
            (*self.local_shape, config.hidden_size),
            grouped_qkv(groups, queries, shape[2:], place),
            bias_boxes,
            Init(std=config.init_method_std),
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(build, width, partial=True)
            self.k_layernorm = Norm(build, width, partial=True)
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        bias = config.add_bias_linear or config.add_proj_bias
        self.linear_proj = RowParallelLinear(build, heads * width, config.hidden_size, bias=bias, init=scaled)

    def project(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        fused = self.linear_qkv(x, tokens).unflatten(-1, self.local_shape)
        if self.share > 1:
            fused = cast(Tensor, _SumOnFirst.apply(fused, self.share, self.group))
        q, k, v = fused.split((self.local_queries, 1, 1), dim=-2)  # one gradient, where slices would have three
        q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if tokens.rotary is not None:
            q, k = self.rotate(q, tokens.rotary), self.rotate(k, tokens.rotary)
        return q, k, v
