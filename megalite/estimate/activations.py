"""Bytes of activations as closed formulas (Korthikanti et al. 2022), of what a pipeline chunk keeps.

Key idea: from a microbatch's forward to its backward a chunk keeps what the backward reads; recomputation keeps less,
and needs the rest once, for the layers at work. How many microbatches are kept at a time is the schedule's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.check_precision import FP8_BLOCKS
from megalite.config.resolve import head_widths, heads_exchanged
from megalite.config.schema import ROTARY, RunConfig

LOGITS = 1 << 25
"""Logits that the output layer computes at a time: few of all; but of many tokens, since each chunk of them reads and
writes the whole gradient of the weight."""


def logits_at_a_time(tokens: int, columns: int) -> int:
    """Of so many tokens' logits, those of chunks that are as equal as can be."""
    return -(-tokens // max(1, -(-tokens * columns // LOGITS))) * columns


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes. `kept`: of one microbatch, from its forward to its backward. `working`: needed besides, once, while a
    backward runs: what is recomputed, and gradients of activations."""

    kept: int
    working: int


def chunk_activations(
    config: RunConfig, vocab_size: int, *, layers: int, in_fp8: int = 0, has_output: bool, fused_attention: bool
) -> ChunkActivations:
    """Of a resolved configuration, for a chunk of so many layers, of which so many compute `in_fp8`, and perhaps the
    output, with what predicts further tokens.

    A GPT-2 layer with dropout keeps s·b·h·34 bytes in half precision; with t tensor-parallel ranks s·b·h(10 + 24/t),
    with sequence parallelism s·b·h·34/t; twice that in float32 without the masks. Rotary positions and gated units add
    what they keep; attention without a fused kernel adds its s² weights. Where weight gradients wait, with FP8 it is an
    upper bound: what waits is in eight bits.
    """
    tokens = config.data.seq_length // config.layout.context_parallel_size * config.training.micro_batch_size
    layer = _Layer.of(config, fused_attention=fused_attention, in_fp8=in_fp8 / max(1, layers))
    kept, working = layer.of_chunk(config, layers)
    working += layer.gradients
    if has_output:
        logits = logits_at_a_time(tokens, -(-vocab_size // config.layout.tensor_model_parallel_size))
        depths = config.model.mtp_num_layers or 0
        output = 2 * layer.input  # input and gradient of the last norm
        # Of each depth the same, the inputs of two norms, and what they give side by side.
        kept += output + depths * ((layer.input if layer.recomputed else layer.kept) + output + 4 * layer.input)
        working = max(working - output, compute_bytes(config) * logits / tokens)  # one is over when the other runs
    return ChunkActivations(int(tokens * kept), int(tokens * working))


@dataclass(frozen=True)
class _Layer:
    """Bytes a token, of a mean layer. `input`: the layer's; `kept`: all that its backward reads; `recomputed`: a
    layer of multi-token prediction is, as all of a stage are; `again`: the part of
    it that selective recomputation computes again; `gradients`: of activations, the most at a time."""

    input: float
    kept: float
    recomputed: bool
    again: float
    gradients: float

    @classmethod
    def of(cls, config: RunConfig, *, fused_attention: bool, in_fp8: float) -> _Layer:
        """`in_fp8`: the share of the layers that compute so."""
        model, layout, compute = config.model, config.layout, compute_bytes(config)
        tp = layout.tensor_model_parallel_size
        between = model.hidden_size / (tp if layout.sequence_parallel else 1)
        heads = model.num_attention_heads / tp
        up = model.ffn_hidden_size / tp * (2 if model.swiglu else 1)
        attention = _latent_attention(config) if model.multi_latent_attention else _attention(config)
        exchanged, groups, (query, value) = (
            heads_exchanged(layout),
            max(1, model.num_query_groups / tp),
            head_widths(model),
        )
        if exchanged > 1:  # the result before its exchange, and keys and values that ranks share
            attention += heads * value + groups * (query + value) * (max(1, exchanged / groups) - 1)
        by_blocks = layout.context_parallel_size > exchanged  # which keep no weights
        weights = 0.0 if fused_attention or by_blocks else _attention_weights(config) * heads
        mlp = compute * (up + model.ffn_hidden_size / tp)
        norms = compute * 2 * between  # their results; their inputs are as large
        inputs = norms
        if _inputs_in_eight_bits(config):  # of linear layers; the result of attention is also kept as it is
            normed = "layernorm" in (config.training.recompute_modules or ())  # kept as they are, to be computed again
            inputs -= 0.0 if normed else in_fp8 * (norms - norms / compute)
            mlp -= in_fp8 * (compute - 1) * model.ffn_hidden_size / tp
            attention += in_fp8 * heads * head_widths(model)[1] / compute
        masks = 2 * between if model.hidden_dropout else 0.0
        modules = _recomputed_modules(config)
        again = {"core_attn": weights, "mlp": mlp, "layernorm": inputs}
        return cls(
            input=compute * between,
            recomputed=config.training.recompute_granularity == "full"
            and config.training.recompute_method == "uniform",
            kept=norms + inputs + masks + compute * attention + weights + mlp,
            again=sum(count for name, count in again.items() if name in modules),
            gradients=compute * (up + 2 * model.hidden_size),
        )

    def of_chunk(self, config: RunConfig, layers: int) -> tuple[float, float]:
        """Kept and computed again, by a chunk of so many layers."""
        training = config.training
        if training.recompute_granularity != "full":
            return layers * (self.kept - self.again), self.again
        count = min(layers, training.recompute_num_layers or 1)
        if training.recompute_method == "uniform":
            return -(-layers // max(1, count)) * self.input, count * self.kept
        return count * self.input + (layers - count) * self.kept, self.kept


def _attention(config: RunConfig) -> float:
    """Numbers a token that a layer's attention keeps: queries, keys, values and the result; rotated ones besides."""
    model, tp = config.model, config.layout.tensor_model_parallel_size
    heads, groups = model.num_attention_heads / tp, max(1, model.num_query_groups / tp)
    rotated = (heads + groups) * model.kv_channels if model.position_embedding_type in ROTARY else 0
    return (2 * heads + 2 * groups) * model.kv_channels + rotated


def _latent_attention(config: RunConfig) -> float:
    """The same of multi-latent attention: queries and keys, which are put together of two parts, what values were made
    with, the result; latent vectors, and normalised ones besides."""
    model, tp = config.model, config.layout.tensor_model_parallel_size
    query, value = head_widths(model)
    latents = (model.kv_lora_rank + (model.q_lora_rank or 0)) * (2 if model.qk_layernorm else 1)
    latents += model.qk_pos_emb_head_dim
    heads = model.num_attention_heads / tp * (2 * query + model.qk_head_dim + 2 * value)
    return heads + latents / (tp if config.layout.sequence_parallel else 1)


def _inputs_in_eight_bits(config: RunConfig) -> bool:
    """Whether linear layers keep their inputs so: those whose scale is that of a whole tensor."""
    return config.precision.fp8_format is not None and config.precision.fp8_recipe not in FP8_BLOCKS


def _attention_weights(config: RunConfig) -> float:
    """Bytes of the softmax of one head and query: wide, rounded to the compute dtype, its mask, and the rest after
    it."""
    compute = compute_bytes(config)
    each = wide_bytes(config) + (compute if compute != wide_bytes(config) else 0)
    if config.model.attention_dropout:
        each += 1 + compute
    return float(config.data.seq_length * each)


def _recomputed_modules(config: RunConfig) -> set[str]:
    if config.training.recompute_granularity != "selective":
        return set()
    modules = set(config.training.recompute_modules or ["core_attn"])
    if config.layout.pipeline_schedule == "zb-h1":  # the weight gradients that wait keep the linear layers' inputs
        modules -= {"mlp", "layernorm"}
    return modules


def compute_bytes(config: RunConfig) -> int:
    """Of a number in the compute dtype."""
    return 2 if config.precision.bf16 or config.precision.fp16 else wide_bytes(config)


def wide_bytes(config: RunConfig) -> int:
    """Of a number in the wide dtype."""
    return 8 if config.precision.fp64 else 4
