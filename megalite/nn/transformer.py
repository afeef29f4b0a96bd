"""One pre-norm transformer layer (Radford et al. 2019)."""

from __future__ import annotations

from torch import Tensor

from megalite.nn.attention import SelfAttention
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.dropout import hidden_dropout
from megalite.nn.mlp import MLP
from megalite.nn.module import Build, SequenceInfo, ShardedModule
from megalite.nn.norm import Norm


class TransformerLayer(ShardedModule):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). `number`: global, from 0."""

    def __init__(self, build: Build, backend: AttentionBackend, number: int):
        super().__init__()
        self.number, self.recompute = number, build.recompute
        self.drop = build.config.hidden_dropout
        partial = build.mesh.layout.sequence_parallel
        self.input_layernorm = Norm(build, build.config.hidden_size, partial=partial)
        self.self_attention = SelfAttention(build, backend, number)
        self.pre_mlp_layernorm = Norm(build, build.config.hidden_size, partial=partial)
        self.mlp = MLP(build)

    def forward(self, x: Tensor, info: SequenceInfo, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """`x` [s, b, h] → [s, b, h]."""
        run = self.recompute.run_normed
        y = run("attention", self.self_attention, self.input_layernorm, x, info, rotary)
        x = x + self._drop(y, info, "attention output")
        y = run("mlp", self.mlp, self.pre_mlp_layernorm, x, info)
        return x + self._drop(y, info, "mlp output")

    def _drop(self, x: Tensor, info: SequenceInfo, site: str) -> Tensor:
        return hidden_dropout(x, self.drop, info.dropout_keys, info.token_index, self.number, site)
