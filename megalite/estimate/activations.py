"""Bytes of activations as closed formulas (Korthikanti et al. 2022), of what a pipeline chunk keeps.

Key idea: from a microbatch's forward to its backward a chunk keeps what the backward reads; recomputation keeps less,
and needs the rest once, for the layers at work. How many microbatches are kept at a time is the schedule's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from megalite.config.check_precision import FP8_BLOCKS
from megalite.config.resolve import balancing, expert_layers, head_widths, heads_exchanged
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
    config: RunConfig,
    vocab_size: int,
    *,
    layers: int,
    with_experts: int = 0,
    in_fp8: int = 0,
    has_output: bool,
    fused_attention: bool,
) -> ChunkActivations:
    """Of a resolved configuration, for a chunk of so many layers, of which so many have experts and so many compute
    `in_fp8`, and perhaps the output, with what predicts further tokens.

    A GPT-2 layer with dropout keeps s·b·h·34 bytes in half precision; with t tensor-parallel ranks s·b·h(10 + 24/t),
    with sequence parallelism s·b·h·34/t; twice that in float32 without the masks. Rotary positions and gated units add
    what they keep; attention without a fused kernel adds its s² weights. Where weight gradients wait, with FP8 it is an
    upper bound: what waits is in eight bits.

    Experts get rows as if tokens were spread evenly over them, and none dropped: a rank's own tokens times
    --moe-router-topk. A rank on which the experts of more tokens are keeps more.
    """
    tokens = config.data.seq_length // config.layout.context_parallel_size * config.training.micro_batch_size
    of = partial(_Layer.of, config, fused_attention=fused_attention, in_fp8=in_fp8 / max(1, layers))
    dense, experts = of(with_experts=False), of(with_experts=True)
    kept, working = _of_chunk(config, [dense] * (layers - with_experts) + [experts] * with_experts)
    if has_output:
        logits = logits_at_a_time(tokens, -(-vocab_size // config.layout.tensor_model_parallel_size))
        depths = config.model.mtp_num_layers or 0
        layer = experts if expert_layers(config.model)[-1] else dense
        output = 2 * layer.input  # input and gradient of the last norm
        # Of each depth the same, the inputs of two norms, and what they give side by side.
        kept += output + depths * ((layer.input if layer.recomputed else layer.kept) + output + 4 * layer.input)
        working = max(working - output, compute_bytes(config) * logits / tokens)  # one is over when the other runs
    return ChunkActivations(int(tokens * kept), int(tokens * working))


@dataclass(frozen=True)
class _Layer:
    """Bytes a token, of a mean layer of one kind. `input`: the layer's; `kept`: all that its backward reads;
    `recomputed`: a layer of multi-token prediction is, as all of a stage are; `again`: the part of it that selective
    recomputation computes again; `gradients`: of activations, the most at a time."""

    input: float
    kept: float
    recomputed: bool
    again: float
    gradients: float

    @classmethod
    def of(cls, config: RunConfig, *, with_experts: bool, fused_attention: bool, in_fp8: float) -> _Layer:
        """`in_fp8`: the share of the layers that compute so."""
        model, layout, compute = config.model, config.layout, compute_bytes(config)
        tp = layout.tensor_model_parallel_size
        between = model.hidden_size / (tp if layout.sequence_parallel else 1)
        heads = model.num_attention_heads / tp
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
        mlp, inner, gradients = _experts(config) if with_experts else _mlp(config, model.ffn_hidden_size / tp)
        norms = compute * 2 * between  # their results; their inputs are as large
        inputs = norms
        if _inputs_in_eight_bits(config):  # of linear layers; the result of attention is also kept as it is
            normed = "layernorm" in (config.training.recompute_modules or ())  # kept as they are, to be computed again
            inputs -= 0.0 if normed else in_fp8 * (norms - norms / compute)
            mlp -= in_fp8 * (compute - 1) * inner
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
            gradients=gradients,
        )


_KEPT, _AGAIN, _GRADIENTS = attrgetter("kept"), attrgetter("again"), attrgetter("gradients")


def _of_chunk(config: RunConfig, layers: Sequence[_Layer]) -> tuple[float, float]:
    """Kept, and needed besides while a backward runs, by a chunk of these layers in any order."""
    training, size = config.training, len(layers)
    kept, again, gradients = (max((get(each) for each in layers), default=0.0) for get in (_KEPT, _AGAIN, _GRADIENTS))
    if training.recompute_granularity != "full":
        return sum(each.kept - each.again for each in layers), again + gradients
    count, inputs = min(size, training.recompute_num_layers or 1), sum(each.input for each in layers) / max(1, size)
    if training.recompute_method == "uniform":
        return -(-size // max(1, count)) * inputs, count * kept + gradients
    mean = sum(each.kept for each in layers) / max(1, size)
    return count * inputs + (size - count) * mean, kept + gradients


def _mlp(config: RunConfig, width: float) -> tuple[float, float, float]:
    """Of an MLP with so much of its width here: bytes a token that it keeps beside its input; the numbers that go into
    the second product; bytes of gradients."""
    up, compute = width * (2 if config.model.swiglu else 1), compute_bytes(config)
    return compute * (up + width), width, compute * (up + 2 * config.model.hidden_size)


def _experts(config: RunConfig) -> tuple[float, float, float]:
    """The same of experts and what is around them: rows that experts here get, each token's results, the router."""
    model, layout, compute, wide = config.model, config.layout, compute_bytes(config), wide_bytes(config)
    tp, hidden, topk = layout.tensor_model_parallel_size, model.hidden_size, model.moe_router_topk
    etp = layout.expert_tensor_parallel_size or tp
    own = 1 / tp if layout.sequence_parallel else 1.0  # a rank's tokens between blocks
    rows = own * topk * etp
    # What is weighted: of own tokens; or of those of all ranks that share the experts, whoever has the experts.
    weighted = own * topk
    if model.moe_token_dispatcher_type == "allgather":
        weighted *= layout.expert_model_parallel_size * etp
    kept, _, gradients = _mlp(config, (model.moe_ffn_hidden_size or model.ffn_hidden_size) / etp)
    kept = rows * (kept + compute * hidden) + weighted * compute * hidden + own * _router(config)
    # Of the weighted sum: gradients of both factors, and where the dtypes differ one rounded.
    product = weighted * hidden * (2 * wide + (compute if compute != wide else 0))
    gradients, inner = max(product, rows * gradients), 0.0
    if model.moe_shared_expert_intermediate_size is not None:
        shared, inner, _ = _mlp(config, model.moe_shared_expert_intermediate_size / tp)
        kept += shared + (own * compute * hidden if model.moe_shared_expert_gate else 0.0)
    return kept, inner, gradients


def _router(config: RunConfig) -> float:
    """Bytes a token that a router keeps: scores of all experts as often as something is formed of them; choices and
    weights, in which order they were sent; its input in another format."""
    model, wide = config.model, wide_bytes(config)
    product = {"fp32": 4, "fp64": 8}.get(model.moe_router_dtype or "", compute_bytes(config))
    kinds = balancing(model)
    balanced = any(kinds.values())
    of_all = "sinkhorn" in kinds or model.moe_router_pre_softmax or model.moe_router_score_function == "sigmoid"
    scores = (of_all + balanced + bool(model.moe_z_loss_coeff)) * (model.num_experts or 0) * max(wide, product)
    changed = product * model.hidden_size if product != compute_bytes(config) else 0
    return scores + model.moe_router_topk * (2 * 8 + 2 * wide) + changed


def _attention(config: RunConfig) -> float:
    """Numbers a token that a layer's attention keeps: queries, keys, values and the result; normalised and rotated
    ones besides."""
    model, tp = config.model, config.layout.tensor_model_parallel_size
    heads, groups = model.num_attention_heads / tp, max(1, model.num_query_groups / tp)
    besides = (model.position_embedding_type in ROTARY) + model.qk_layernorm
    return (2 * heads + 2 * groups + besides * (heads + groups)) * model.kv_channels


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
