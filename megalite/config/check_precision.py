"""Combinations of flags that can't work: number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import all_fields, needs
from megalite.config.resolve import ffn_width, shards
from megalite.config.schema import ModelConfig, PrecisionConfig, RunConfig

FP8_BLOCKS = {"blockwise": 128, "mxfp8": 32}
"""Elements in a row that share a scale, by recipe; of a weight of `blockwise` in both dimensions."""
_DELAYED = ("precision.fp8_margin", "precision.fp8_amax_history_len", "precision.fp8_amax_compute_algo")
_IN_BF16 = ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16")


def precision_problems(config: RunConfig) -> Iterator[str]:
    """Problems of the number formats."""
    precision = config.precision
    chosen = [name for name in ("bf16", "fp16", "fp64") if getattr(precision, name)]
    if len(chosen) > 1:
        yield f"{' and '.join('--' + name for name in chosen)} exclude each other: choose one"
    start, least = precision.initial_loss_scale, precision.min_loss_scale
    if precision.fp16 and precision.loss_scale is None and start < least:
        yield f"--initial-loss-scale {start} is below --min-loss-scale {least}"
    if precision.grad_reduce_in_bf16 and not precision.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16"
    yield from _fp8_problems(config)


def idle_formats(precision: PrecisionConfig) -> Iterator[tuple[str, list[str]]]:
    """Why settings of number formats can't matter beside the others, and which."""
    names = "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    dynamic = [f"precision.{name}" for name in names]
    if not precision.fp16:
        yield "without --fp16", ["precision.loss_scale", *dynamic]
    elif precision.loss_scale is not None:
        yield "with a fixed --loss-scale", dynamic
    if precision.fp8_amax_compute_algo != "max":
        yield "without --fp8-amax-compute-algo max", ["precision.fp8_amax_history_len"]
    elif precision.fp8_amax_history_len == 1:
        yield "with --fp8-amax-history-len 1", ["precision.fp8_amax_compute_algo"]


def _fp8_problems(config: RunConfig) -> Iterator[str]:
    precision, layers = config.precision, config.model.num_layers
    wanted = precision.fp8_format is not None
    fp8 = [path for path in all_fields() if path.startswith("precision.fp8_")]
    others = "precision.first_last_layers_bf16", "logging.log_fp8_stats"
    yield from needs(config, wanted, "--fp8-format", *fp8, *others)
    yield from needs(config, precision.first_last_layers_bf16, "--first-last-layers-bf16", *_IN_BF16)
    if not wanted:
        return
    yield from _gather_problems(config)
    yield from needs(config, precision.fp8_recipe == "delayed", "--fp8-recipe delayed", *_DELAYED)
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and start == end == 0:
        yield "--first-last-layers-bf16 with no layer at the start and none at the end: leave it out"
    if precision.first_last_layers_bf16 and layers is not None and start + end >= layers:
        yield (
            f"--first-last-layers-bf16: {start} first and {end} last layers are all {layers}, so none would compute in "
            "FP8; lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16"
        )
    recipe, tp = precision.fp8_recipe, config.layout.tensor_model_parallel_size
    for what, width in cut_blocks(config.model, recipe, tp):
        yield (
            f"--fp8-recipe {recipe} with --tensor-model-parallel-size {tp}: a rank has {width} {what}, which isn't a "
            f"multiple of the {FP8_BLOCKS[recipe]} that share a scale; change the size, or use --fp8-recipe tensorwise"
        )
    yield from _chunk_problems(config)


def _chunk_problems(config: RunConfig) -> Iterator[str]:
    """Chunks of sequences that end inside a block of tokens that share a scale."""
    cp, length, rows = config.layout.context_parallel_size, config.data.seq_length, config.training.micro_batch_size
    recipe = config.precision.fp8_recipe
    if cp == 1 or recipe not in FP8_BLOCKS or not length or not rows:
        return
    if length // (2 * cp) * rows % FP8_BLOCKS[recipe]:
        yield (
            f"--fp8-recipe {recipe} with --context-parallel-size {cp}: a chunk of --seq-length {length} and "
            f"--micro-batch-size {rows} has {length // (2 * cp) * rows} tokens, which isn't a multiple of the "
            f"{FP8_BLOCKS[recipe]} that share a scale; change the length, or use --fp8-recipe tensorwise"
        )


def _gather_problems(config: RunConfig) -> Iterator[str]:
    if not config.precision.fp8_param_gather:
        return
    recipe = config.precision.fp8_recipe
    if not shards(config):
        yield "--fp8-param-gather needs --use-distributed-optimizer or a --data-parallel-sharding-strategy"
    if recipe in FP8_BLOCKS:
        yield (
            f"--fp8-param-gather can't be used with --fp8-recipe {recipe}, whose blocks don't end where ranks' shards "
            "do: use delayed or tensorwise"
        )
    if config.peft.peft != "none":
        yield f"--fp8-param-gather can't be used with --peft {config.peft.peft}: frozen weights aren't gathered"
    if config.optimizer.optimizer_cpu_offload:
        yield "--fp8-param-gather can't be used with --optimizer-cpu-offload"


def cut_blocks(model: ModelConfig, recipe: str, tp: int) -> list[tuple[str, int]]:
    """What `tp` tensor-parallel ranks would cut inside a block of elements that share a scale: its name, and how many a
    rank has."""
    block = FP8_BLOCKS.get(recipe, 1) if tp > 1 else 1
    return [(what, width) for what, width in _widths_on_a_rank(model, tp) if width % block]


def _widths_on_a_rank(model: ModelConfig, tp: int) -> Iterator[tuple[str, int]]:
    """What tensor parallelism cuts: a name, and how many of it each rank has in a row."""
    heads, hidden, groups = model.num_attention_heads, model.hidden_size, model.num_query_groups
    inner = ffn_width(model)
    if inner is not None:
        yield "inputs of linear_fc2 and outputs of linear_fc1", inner // tp
    if heads is None or hidden is None or (tp > heads):
        return
    width = model.kv_channels or hidden // heads
    groups = groups if model.group_query_attention and groups else heads
    queries = heads // groups
    yield "inputs of linear_proj", heads // tp * width
    if tp <= groups:
        yield "outputs of linear_qkv", groups // tp * (queries + 2) * width
    else:
        yield "outputs of linear_qkv that are queries", heads // tp * width
        yield "outputs of linear_qkv that are keys and values", 2 * width
