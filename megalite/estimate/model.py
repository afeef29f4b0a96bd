"""Sizes and costs of a GPT as closed formulas of its resolved configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.resolve import expert_layers, head_widths
from megalite.config.schema import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Logical parameters (no padding). `active`: without the experts that a token isn't sent to. `matmul`: of these,
    those that multiply every token, the output layer included even where it is tied to the embedding, and counted for
    each token that is predicted. Where tokens of full experts are dropped, fewer do."""

    total: int
    active: int
    matmul: int


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of the network that `models.gpt` builds, without the state of routers."""
    hidden, depths = config.hidden_size, config.mtp_num_layers or 0
    norm = 1 if config.normalization == "RMSNorm" else 2
    attention, biases, normalised = _latent_attention(config) if config.multi_latent_attention else _attention(config)
    small = norm * (2 * hidden + (normalised if config.qk_layernorm else 0))
    if config.add_bias_linear:
        small += biases + hidden
    else:
        small += biases * config.add_qkv_bias + hidden * config.add_proj_bias
    layers, with_experts = config.num_layers + depths, layers_with_experts(config)
    routed, beside, experts_biases = _experts(config)
    mlp, mlp_biases = _mlp(config, config.ffn_hidden_size)
    each = layers - with_experts
    matmul = layers * attention + each * mlp + with_experts * (config.moe_router_topk * routed + beside)
    joining = 2 * hidden * hidden  # states and embeddings, at each depth
    matmul += depths * joining
    active = matmul + layers * small + each * mlp_biases + with_experts * experts_biases + depths * 3 * norm * hidden
    active += norm * hidden + vocab_size * hidden
    if config.position_embedding_type == "learned_absolute":
        active += config.max_position_embeddings * hidden
    if config.untie_embeddings_and_output_weights:
        active += vocab_size * hidden
    idle = with_experts * ((config.num_experts or 0) - config.moe_router_topk) * routed
    return ParameterCount(active + idle, active, matmul + (1 + depths) * vocab_size * hidden)


def layers_with_experts(config: ModelConfig) -> int:
    """How many; layers of multi-token prediction are as the last one."""
    which = expert_layers(config)
    return sum(which) + (config.mtp_num_layers or 0) * which[-1]


def _mlp(config: ModelConfig, inner: int) -> tuple[int, int]:
    """Parameters of an MLP's products, and its biases."""
    up = inner * (2 if config.swiglu else 1)
    return config.hidden_size * (up + inner), (up + config.hidden_size) * config.add_bias_linear


def _experts(config: ModelConfig) -> tuple[int, int, int]:
    """Parameters of an expert's products; of those that every token meets beside: the router, shared experts and their
    gate; biases of shared experts."""
    hidden, shared, biases = config.hidden_size, 0, 0
    if config.moe_shared_expert_intermediate_size is not None:
        shared, biases = _mlp(config, config.moe_shared_expert_intermediate_size)
        shared += hidden * config.moe_shared_expert_gate
    return _mlp(config, config.moe_ffn_hidden_size or 0)[0], hidden * (config.num_experts or 0) + shared, biases


def _attention(config: ModelConfig) -> tuple[int, int, int]:
    """Parameters of a layer's products; biases of queries, keys and values; the width that norms of them have."""
    heads, width = config.num_attention_heads, config.kv_channels
    qkv = (heads + 2 * config.num_query_groups) * width
    return config.hidden_size * (qkv + heads * width), qkv, 2 * width


def _latent_attention(config: ModelConfig) -> tuple[int, int, int]:
    """The same of multi-latent attention, where it's latent vectors that are normalised."""
    heads, hidden, latent, queries = (
        config.num_attention_heads,
        config.hidden_size,
        config.kv_lora_rank,
        config.q_lora_rank,
    )
    query, value = head_widths(config)
    total = hidden * heads * query if queries is None else queries * (hidden + heads * query)
    total += hidden * (latent + config.qk_pos_emb_head_dim) + latent * heads * (config.qk_head_dim + value)
    return total + heads * value * hidden, 0, latent + (queries or 0)


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
    frozen one hasn't; causal attention at half 3·L·s·heads·(width of queries + of values). With virtual tokens,
    attention's s² becomes (s + n)² where they are computed, s² + 2sn where not. `adapter`: None where all is trained.
    """
    matmul = count_parameters(config, vocab_size).matmul
    layers = config.num_layers + (config.mtp_num_layers or 0)
    width = layers * config.num_attention_heads * sum(head_widths(config)) / 2
    if adapter is None:
        return 6.0 * matmul + 6.0 * seq_length * width
    output, n = vocab_size * config.hidden_size, adapter.virtual_tokens
    attended = (seq_length + n) ** 2 / seq_length if adapter.computed else seq_length + 2 * n
    rows = (seq_length + n) / seq_length if adapter.computed else 1.0
    trained = 6.0 * adapter.matmul + (2.0 * output if adapter.head else 0.0)
    return 4.0 * ((matmul - output) * rows + output) + trained + 6.0 * attended * width
