"""Multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2): further tokens from the model's states.

Key idea: depth d joins the states of depth d - 1 with the embedding of the token d places ahead, so the causal chain
stays whole. The layers are on the last stage, where the states are; embedding and output layer are the main model's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.distributed.param_spec import Init
from megalite.nn.attention_core import CoreAttention
from megalite.nn.dropout import hidden_dropout
from megalite.nn.embedding import VocabularyParallelEmbedding
from megalite.nn.linear import ReplicatedLinear
from megalite.nn.module import Build, ShardedModule
from megalite.nn.norm import Norm
from megalite.nn.recompute import rerun
from megalite.nn.tokens import Tokens
from megalite.nn.transformer import TransformerLayer


class MultiTokenLayer(ShardedModule):
    """One depth, counted from 0. Its transformer layer counts on from the main model's last."""

    def __init__(self, build: Build, core: CoreAttention, depth: int):
        super().__init__()
        config, partial = build.config, build.mesh.layout.sequence_parallel
        self.number, self.drop = config.num_layers + depth, config.hidden_dropout
        self.recomputed = build.recompute.layers_at_once > 0
        build = build.in_layer(self.number)
        hidden = config.hidden_size
        self.enorm, self.hnorm = Norm(build, hidden, partial=partial), Norm(build, hidden, partial=partial)
        self.eh_proj = ReplicatedLinear(build, 2 * hidden, hidden, Init(std=config.init_method_std))
        self.transformer_layer = TransformerLayer(build, core, self.number)
        self.final_layernorm = Norm(build, hidden, partial=partial)

    def forward(self, x: Tensor, embedded: Tensor, tokens: Tokens) -> Tensor:
        """Normalised states `x` and embeddings [s, b, h] → normalised states."""
        embedded = hidden_dropout(embedded, self.drop, tokens, self.number, "embedding")
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), dim=-1), tokens)
        recomputed = self.recomputed and torch.is_grad_enabled()
        x = rerun(self.transformer_layer, x, tokens) if recomputed else self.transformer_layer(x, tokens)
        return self.final_layernorm(x)


class EmbeddingAhead(nn.Module):
    """Embeddings of the tokens ahead. A module of its own: the table is needed before the layers, and not with them."""

    def forward(self, x: Tensor, ids: Tensor, table: VocabularyParallelEmbedding) -> tuple[Tensor, ...]:
        """`ids` int64 [b, depths, s] → of each depth [s, b, h]. `x`: the states that the layers begin with."""
        found = table(ids.permute(2, 1, 0).flatten(1))
        return found.unflatten(1, ids.shape[1::-1]).unbind(dim=1)


class MultiTokenPrediction(ShardedModule):
    """All depths, and the embeddings that they begin with."""

    def __init__(self, build: Build, core: CoreAttention, depths: int):
        super().__init__()
        self.ahead = EmbeddingAhead()
        self.layers = nn.ModuleDict({str(depth): MultiTokenLayer(build, core, depth) for depth in range(depths)})

    def forward(self, x: Tensor, ids: Tensor, tokens: Tokens, table: VocabularyParallelEmbedding) -> list[Tensor]:
        """The normalised states `x` [s, b, h] of the main model → those of each depth. `ids` int64 [b, depths, s]."""
        states = []
        for layer, embedded in zip(self.layers.values(), self.ahead(x, ids, table), strict=True):
            x = layer(x, embedded, tokens)
            states.append(x)
        return states
