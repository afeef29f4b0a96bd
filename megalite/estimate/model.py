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
    qkv = (heads + 2 * config.num_query_groups) * width
    up = inner * (2 if config.swiglu else 1)
    matmul_layer = hidden * qkv + heads * width * hidden + hidden * up + inner * hidden
    norm = 1 if config.normalization == "RMSNorm" else 2
    small = 2 * norm * hidden
    if config.add_bias_linear:
        small += qkv + hidden + up + hidden
    else:
        small += qkv * config.add_qkv_bias + hidden * config.add_proj_bias
    if config.qk_layernorm:
        small += 2 * norm * width
    total = layers * (matmul_layer + small) + norm * hidden + vocab_size * hidden
    if config.position_embedding_type == "learned_absolute":
        total += config.max_position_embeddings * hidden
    if config.untie_embeddings_and_output_weights:
        total += vocab_size * hidden
    return ParameterCount(total, layers * matmul_layer + vocab_size * hidden)


@dataclass(frozen=True)
class AdapterWork:
    """What weights trained beside frozen ones add to the work for a token.

    `matmul`: parameters of theirs that multiply every token (LoRA's matrices). `head`: the output layer is trained too,
    as a classifier's. `virtual_tokens`: before each sequence; `computed`: layers compute them as they do tokens (a
    prompt), and not only attend to them (a prefix).
    """

    matmul: int = 0
    head: bool = False
    virtual_tokens: int = 0
    computed: bool = False


def training_flops_per_token(
    config: ModelConfig, vocab_size: int, seq_length: float, adapter: AdapterWork | None = None
) -> float:
    """Forward and backward of a token of a sequence of `seq_length`. `vocab_size`: outputs.

    A parameter that multiplies every token costs 2 forward, 2 for the gradient of its input and 2 for its own, which a
    frozen one hasn't; causal attention at half 6·L·s·(heads · head width). With virtual tokens, attention's s² becomes
    (s + n)² where they are computed, s² + 2sn where not. `adapter`: None where all is trained.
    """
    matmul = count_parameters(config, vocab_size).matmul
    width = config.num_layers * config.num_attention_heads * config.kv_channels
    if adapter is None:
        return 6.0 * matmul + 6.0 * seq_length * width
    output, n = vocab_size * config.hidden_size, adapter.virtual_tokens
    attended = (seq_length + n) ** 2 / seq_length if adapter.computed else seq_length + 2 * n
    rows = (seq_length + n) / seq_length if adapter.computed else 1.0
    trained = 6.0 * adapter.matmul + (2.0 * output if adapter.head else 0.0)
    return 4.0 * ((matmul - output) * rows + output) + trained + 6.0 * attended * width
