"""A Llama as one writes it in plain PyTorch: what torch gives without a framework.

Key idea: separate linear layers, `scaled_dot_product_attention`, `nn.RMSNorm`, cross-entropy over all logits; tensors
have the names of transformers' Llama, so that one function fills both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [b, heads, s, d] by the angles of cos, sin [s, d / 2]; halves form pairs."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.width = config.kv_channels
        queries, keys = config.num_attention_heads * self.width, config.num_query_groups * self.width
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.width).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Llama(nn.Module):
    """Of a resolved configuration. `forward`: the mean loss of tokens [b, s + 1]."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence: int):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        pairs = torch.arange(0, config.kv_channels, 2) / config.kv_channels
        angles = torch.arange(sequence)[:, None] * config.rotary_base**-pairs
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Of hidden states [b, s, h] after the last layer."""
        logits = self.lm_head(self.model.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens[:, :-1])
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss(x, tokens[:, 1:])

    def compile_parts(self) -> None:
        """Compile the layer, once for all, and the output with its loss: as fast as the whole, and soon ready."""
        for layer in self.model.layers:
            layer.compile()
        self.loss = torch.compile(self.loss)  # type: ignore[method-assign]
