"""One pre-norm transformer layer (Radford et al. 2019)."""

from __future__ import annotations

from torch import Tensor

from megalite.config.resolve import expert_layers
from megalite.nn.attention import GroupedQueryAttention, SelfAttention
from megalite.nn.attention_core import CoreAttention
from megalite.nn.dropout import hidden_dropout
from megalite.nn.latent_attention import LatentAttention
from megalite.nn.mlp import MLP
from megalite.nn.module import Build, ShardedModule
from megalite.nn.moe.layer import MoELayer
from megalite.nn.norm import Norm
from megalite.nn.tokens import Tokens


class TransformerLayer(ShardedModule):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). `number`: global, from 0.
    The MLP may be a mixture of experts."""

    def __init__(self, build: Build, core: CoreAttention, number: int):
        super().__init__()
        self.number, self.recompute = number, build.recompute
        self.drop = build.config.hidden_dropout
        partial = build.mesh.layout.sequence_parallel
        self.input_layernorm = Norm(build, build.config.hidden_size, partial=partial)
        kind = LatentAttention if build.config.multi_latent_attention else GroupedQueryAttention
        self.self_attention: SelfAttention = kind(build, core, number)
        self.pre_mlp_layernorm = Norm(build, build.config.hidden_size, partial=partial)
        has_experts = expert_layers(build.config)[min(number, build.config.num_layers - 1)]  # beyond: as the last one
        self.mlp: MLP | MoELayer = MoELayer(build, number) if has_experts else MLP(build)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`x` [s, b, h] → [s, b, h]."""
        run = self.recompute.run_normed
        y = run("attention", self.self_attention, self.input_layernorm, x, tokens)
        x = x + hidden_dropout(y, self.drop, tokens, self.number, "attention output")
        y = run("mlp", self.mlp, self.pre_mlp_layernorm, x, tokens)
        return x + hidden_dropout(y, self.drop, tokens, self.number, "mlp output")
