"""Multi-latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2): keys and values are made from one short vector a token.

Key idea: what a token leaves for later ones is that latent vector and one rotated part of a key, which all heads share;
so a cache holds these alone. They are small, so every tensor-parallel rank computes them whole, and only what makes the
heads from them is cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.resolve import head_widths
from megalite.distributed.collectives import gather_sequence, sum_gradients
from megalite.distributed.param_spec import Init, cut
from megalite.nn.attention import SelfAttention
from megalite.nn.attention_core import CoreAttention
from megalite.nn.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.nn.module import Build
from megalite.nn.norm import Norm
from megalite.nn.rotary import Rotation
from megalite.nn.tokens import Tokens


class LatentAttention(SelfAttention):
    """Queries from a latent vector of their own or straight from the hidden states; every head has a part that isn't
    rotated and one that is. Latent vectors may be normalised.

    With sequence parallelism a rank computes the latent vectors of its part of the sequence.
    """

    def __init__(self, build: Build, core: CoreAttention, layer: int):
        super().__init__(build, core, layer)
        config = build.config
        hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.plain, self.turned, self.value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        self.local_heads = heads // build.mesh.tp.size
        self.cache_shapes = (1, latent), (1, self.turned)
        self.rotate = Rotation(interleaved=config.rotary_interleaved, compile=build.compile)
        self.group, self.sequence_parallel = build.mesh.tp, build.mesh.layout.sequence_parallel
        init = Init(std=config.init_method_std)
        self.linear_q_proj = self.linear_q_down_proj = self.linear_q_up_proj = self.q_layernorm = None
        if config.q_lora_rank is None:
            self.linear_q_proj = _to_heads(build, head_widths(config)[0], hidden)
        else:
            self.linear_q_down_proj = ReplicatedLinear(build, hidden, config.q_lora_rank, init)
            self.linear_q_up_proj = _to_heads(build, head_widths(config)[0], config.q_lora_rank)
        self.linear_kv_down_proj = ReplicatedLinear(build, hidden, latent + self.turned, init)
        self.linear_kv_up_proj = _to_heads(build, self.plain + self.value, latent)
        self.kv_layernorm = None
        if config.qk_layernorm:
            self.kv_layernorm = Norm(build, latent, partial=self.sequence_parallel)
            if config.q_lora_rank is not None:
                self.q_layernorm = Norm(build, config.q_lora_rank, partial=self.sequence_parallel)
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        bias = config.add_bias_linear or config.add_proj_bias
        self.linear_proj = RowParallelLinear(build, heads * self.value, hidden, bias=bias, init=scaled)

    def project(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """→ queries [s, b, heads, d]; the latent vectors [s, b, 1, kv latent], with sequence parallelism of this
        rank's part of s; the rotated part of keys [s, b, 1, d']."""
        latent, turned = self.linear_kv_down_proj(x, tokens).split((self.linear_kv_up_proj.inputs, self.turned), dim=-1)
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        # Each rank's heads have a part of its gradient.
        turned = (gather_sequence if self.sequence_parallel else sum_gradients)(turned, self.group)[:, :, None]
        q, last = self._queries(x, tokens).split((self.plain, self.turned), dim=-1)
        if tokens.rotary is not None:
            turned, last = self.rotate(turned, tokens.rotary), self.rotate(last, tokens.rotary)
        return torch.cat((q, last), dim=-1), latent[:, :, None], turned

    def _queries(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[s, b, heads, d], not rotated yet."""
        up = self.linear_q_proj
        if up is None:
            assert self.linear_q_down_proj is not None and self.linear_q_up_proj is not None
            x, up = self.linear_q_down_proj(x, tokens), self.linear_q_up_proj
            x = x if self.q_layernorm is None else self.q_layernorm(x)
        return up(x, tokens).unflatten(-1, (self.local_heads, -1))

    def expand(self, kept: tuple[Tensor, Tensor], tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Keys [s, b, heads, d] and values [s, b, heads, e]."""
        latent, turned = kept
        heads = self.linear_kv_up_proj(latent.squeeze(2), tokens).unflatten(-1, (self.local_heads, -1))
        k, v = heads.split((self.plain, self.value), dim=-1)
        return torch.cat((k, turned.expand(-1, -1, self.local_heads, -1)), dim=-1), v


def _to_heads(build: Build, width: int, inputs: int) -> ColumnParallelLinear:
    """From vectors to heads: [heads, width, inputs], cut by heads."""
    heads, place = build.config.num_attention_heads, build.place()
    shape = (heads, width, inputs)
    local, init = (heads // place.tp, width, inputs), Init(std=build.config.init_method_std)
    return ColumnParallelLinear(build, shape, local, cut(shape, 0, place), None, init)
