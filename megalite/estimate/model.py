"""Sizes and costs of a GPT as closed formulas of its resolved configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Logical parameters (no padding). `matmul`: those that multiply every token, the output layer included even
    where it is tied to the embedding."""

    total: int
    matmul: int


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of the network that `models.gpt` builds."""
    hidden, layers, inner = config.hidden_size, config.num_layers, config.ffn_hidden_size
    heads, width = config.num_attention_heads, config.kv_channels
    assert hidden and layers is not None and inner and heads and width
    qkv = (heads + 2 * config.num_query_groups) * width
    up = inner * (2 if config.swiglu else 1)
    matmul_layer = hidden * qkv + heads * width * hidden + hidden * up + inner * hidden
    norm = 1 if config.normalization == "RMSNorm" else 2
    small = 2 * norm * hidden
    if config.add_bias_linear:
        small += qkv + hidden + up + hidden
    elif config.add_qkv_bias:
        small += qkv
    if config.qk_layernorm:
        small += 2 * norm * width
    total = layers * (matmul_layer + small) + norm * hidden + vocab_size * hidden
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None
        total += config.max_position_embeddings * hidden
    if config.untie_embeddings_and_output_weights:
        total += vocab_size * hidden
    return ParameterCount(total, layers * matmul_layer + vocab_size * hidden)


def training_flops_per_token(config: ModelConfig, vocab_size: int, seq_length: float) -> float:
    """Forward and backward: 6 per matmul parameter, and 6·L·s·(heads · head width) for causal attention at half."""
    assert config.num_layers is not None and config.num_attention_heads and config.kv_channels
    attention = 6.0 * config.num_layers * seq_length * config.num_attention_heads * config.kv_channels
    return 6.0 * count_parameters(config, vocab_size).matmul + attention
