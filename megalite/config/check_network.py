"""Combinations of flags that can't work: the network, and how it is cut over processes.

Rotary positions are scaled for longer sequences in one way or in none; one table says which settings each way reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.check_context import context_problems
from megalite.config.check_latent import latent_problems
from megalite.config.fields import all_fields, needs
from megalite.config.resolve import (
    data_parallel_size,
    ffn_width,
    parse_window,
    pipeline_units,
    rotated_head,
    shards,
    virtual_stages,
)
from megalite.config.schema import ROTARY, ModelConfig, RunConfig

_SCALED = ("rope_scaling_factor", "rope_original_max_position_embeddings")
_YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "yarn_mscale", "yarn_mscale_all_dim")
_LISTS = ("longrope_short_factor", "longrope_long_factor")
_READS = {
    "--use-rope-scaling": (*_SCALED, "rope_low_freq_factor", "rope_high_freq_factor"),
    "--position-embedding-type yarn": (*_SCALED, "rope_attention_factor", *_YARN),
    "--position-embedding-type dynamic": _SCALED,
    "--position-embedding-type longrope": (*_SCALED, "rope_attention_factor", *_LISTS),
}
_ROTARY_ALONE = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
)


def model_problems(config: RunConfig) -> Iterator[str]:
    """Problems of the network alone."""
    yield from _shape_problems(config)
    yield from position_problems(config)
    yield from latent_problems(config)
    model = config.model
    activations = ("swiglu", "squared_relu", "openai_gelu")
    chosen = [name for name in activations if getattr(model, name)]
    if len(chosen) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in chosen)
        yield f"{flags} exclude each other: choose one activation"
    if model.window_size is not None:
        yield from _window_problems(model.window_size)


def _shape_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.hidden_size is not None and ffn_width(model) == 0:
        yield (
            f"--swiglu with --hidden-size {model.hidden_size}: the default MLP width, two thirds of 4 x hidden in "
            "multiples of 64, is 0: give --ffn-hidden-size"
        )
    if heads is None:
        return
    derived = model.kv_channels is None and not model.multi_latent_attention
    if derived and model.hidden_size is not None and model.hidden_size % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {model.hidden_size}; "
            "choose a divisor, or give the width of a head with --kv-channels"
        )
    if model.group_query_attention:
        if heads % groups:
            yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}"
    elif groups not in (1, heads):
        yield f"--num-query-groups {groups} needs --group-query-attention"


def _window_problems(text: str) -> Iterator[str]:
    try:
        left, right = parse_window(text)
    except ValueError as error:
        yield f"--window-size: {error}"
        return
    if left < -1:
        yield f"--window-size {text}: LEFT must be a number of tokens, or -1 for no limit"
    if right not in (0, -1):
        yield f"--window-size {text}: RIGHT must be 0 or -1, since attention is causal"


def layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Problems of cutting this network over this many processes."""
    layout = config.layout
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    cp = layout.context_parallel_size
    if data_parallel_size(layout, world_size) == 0:
        yield (
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} "
            f"= {tp * pp * cp} does not divide the world size {world_size}: "
            f"start a multiple of {tp * pp * cp} processes, or change the layout. To try a small version on this "
            "machine: put `python tools/verify_parallel.py --shrink` in place of `torchrun ... pretrain_gpt.py`"
        )
    yield from _tensor_problems(config)
    yield from _pipeline_problems(config)
    yield from context_problems(config)
    if layout.device == "cpu" and layout.distributed_backend == "nccl":
        yield "--distributed-backend nccl needs CUDA: with --device cpu use gloo"
    yield from _sharding_problems(config)


def _tensor_problems(config: RunConfig) -> Iterator[str]:
    layout, model = config.layout, config.model
    tp = layout.tensor_model_parallel_size
    if tp == 1:
        return
    flag = f"--tensor-model-parallel-size {tp}"
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads is not None and heads % tp:
        yield f"{flag} does not divide --num-attention-heads {heads}"
    if model.group_query_attention and groups % tp and tp % groups:
        yield f"{flag} and --num-query-groups {groups}: one must divide the other"
    width = ffn_width(model)
    if width is not None and width % tp:
        derived = "" if model.ffn_hidden_size is not None else " (its default)"
        yield f"{flag} does not divide --ffn-hidden-size {width}{derived}"
    length = config.data.seq_length
    if layout.sequence_parallel and layout.context_parallel_size == 1 and length is not None and length % tp:
        yield f"--sequence-parallel: {flag} does not divide --seq-length {length}"


def _pipeline_problems(config: RunConfig) -> Iterator[str]:
    layout, model = config.layout, config.model
    pp, chunks, units = layout.pipeline_model_parallel_size, virtual_stages(config), pipeline_units(config)
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    uneven = first is not None or last is not None
    counted = layout.account_for_embedding_in_pipeline_split or layout.account_for_loss_in_pipeline_split
    per_chunk = layout.num_layers_per_virtual_pipeline_stage
    if pp == 1:
        if uneven or counted or per_chunk is not None or chunks > 1:
            yield "flags that split the layers into pipeline stages need --pipeline-model-parallel-size above 1"
        return
    if per_chunk is not None and layout.num_virtual_stages_per_pipeline_rank not in (None, _chunks_of(config)):
        yield "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank: give only one"
    yield from _schedule_problems(config, chunks)
    if model.num_layers is None:
        return
    flag = f"--pipeline-model-parallel-size {pp}"
    if uneven and (counted or per_chunk is not None):
        yield (
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers exclude the "
            "--account-for-*-in-pipeline-split flags and --num-layers-per-virtual-pipeline-stage"
        )
    elif uneven:
        yield from _uneven_problems(model.num_layers, pp, chunks, first, last)
    elif units % pp:
        extra = " (with the embedding or output layer counted)" if counted else ""
        hint = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cut unevenly"
        yield f"{flag} does not divide --num-layers {model.num_layers}{extra}; {hint}"
    elif per_chunk is not None and units // pp % per_chunk:
        yield f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide a stage's {units // pp} layers"
    elif units // pp % chunks:
        yield f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide a stage's {units // pp} layers"


def _chunks_of(config: RunConfig) -> int:
    """Chunks per rank that --num-layers-per-virtual-pipeline-stage makes."""
    per_rank = pipeline_units(config) // config.layout.pipeline_model_parallel_size
    return per_rank // (config.layout.num_layers_per_virtual_pipeline_stage or 1)


def _uneven_problems(layers: int, pp: int, chunks: int, first: int | None, last: int | None) -> Iterator[str]:
    rest = layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    if rest < 0 or (stages == 0 and rest) or (stages and rest % stages):
        yield (
            f"--decoder-first-pipeline-num-layers {first} and --decoder-last-pipeline-num-layers {last} "
            f"leave {rest} of --num-layers {layers} for {stages} stages"
        )
    elif any(count % chunks for count in (first or 0, last or 0, rest // stages if stages else 0)):
        yield f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide the layers of every stage"


def _schedule_problems(config: RunConfig, chunks: int) -> Iterator[str]:
    layout = config.layout
    schedule, group = layout.pipeline_schedule, layout.microbatch_group_size_per_virtual_pipeline_stage
    if schedule == "interleaved" and chunks == 1:
        yield "--pipeline-schedule interleaved needs --num-virtual-stages-per-pipeline-rank above 1"
    if schedule not in ("auto", "interleaved") and chunks > 1:
        yield f"--pipeline-schedule {schedule} has one chunk per rank: leave out the virtual stages or use interleaved"
    if group is not None and chunks == 1:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {group} needs virtual stages"
    elif group is not None and group < layout.pipeline_model_parallel_size:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below "
            f"--pipeline-model-parallel-size {layout.pipeline_model_parallel_size}"
        )


def _sharding_problems(config: RunConfig) -> Iterator[str]:
    layout = config.layout
    if layout.use_distributed_optimizer and layout.data_parallel_sharding_strategy == "no_shard":
        yield "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict each other"
    if layout.overlap_param_gather and not shards(config):
        yield "--overlap-param-gather needs --use-distributed-optimizer or a --data-parallel-sharding-strategy"
    if layout.ddp_bucket_size is not None and layout.data_parallel_sharding_strategy == "optim_grads_params":
        yield (
            f"--ddp-bucket-size {layout.ddp_bucket_size}: with --data-parallel-sharding-strategy optim_grads_params "
            "buckets are the model's layers: leave it out"
        )
    if layout.overlap_param_gather and not layout.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"


def idle_scaling(model: ModelConfig) -> dict[str, list[str]]:
    """The settings of scaling that this network doesn't read, each with the flags of which one would make it matter."""
    kind = model.position_embedding_type
    flag = "--use-rope-scaling" if kind == "rope" and model.use_rope_scaling else f"--position-embedding-type {kind}"
    users = {name: [each for each in _READS if name in _READS[each]] for names in _READS.values() for name in names}
    return {name: flags for name, flags in users.items() if flag not in flags}


def position_problems(config: RunConfig) -> Iterator[str]:
    """Problems of the network's positions."""
    model, length = config.model, config.data.seq_length
    kind, rows = model.position_embedding_type, model.max_position_embeddings
    if rows is None and kind == "learned_absolute":
        yield "--max-position-embeddings is missing: learned positions need the longest sequence"
    if rows is not None and length is not None and length > rows:
        yield f"--seq-length {length} is longer than --max-position-embeddings {rows}"
    if kind not in ROTARY:
        reason = f"--position-embedding-type rope, not {kind}"
        yield from needs(config, False, reason, *(f"model.{name}" for name in _ROTARY_ALONE))
        return
    if model.rope_high_freq_factor <= model.rope_low_freq_factor:
        yield (
            f"--rope-high-freq-factor {model.rope_high_freq_factor} must be above --rope-low-freq-factor "
            f"{model.rope_low_freq_factor}"
        )
    rotated = None if (width := rotated_head(model)) is None else int(width * model.rotary_percent)
    flag = "--qk-pos-emb-head-dim" if model.multi_latent_attention else "--kv-channels"
    if rotated is not None and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {model.rotary_percent} of a head's {width} channels ({flag}) is {rotated}: "
            "rotary positions rotate pairs of channels, so it must be even and at least 2"
        )
    elif kind != "rope":
        yield from _scaling_problems(model, rotated)


def _scaling_problems(model: ModelConfig, rotated: int | None) -> Iterator[str]:
    """Problems of yarn, dynamic and longrope. `rotated`: channels of a head."""
    kind = model.position_embedding_type
    chosen = f"--position-embedding-type {kind}"
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if getattr(model, name):
            yield f"{all_fields()[f'model.{name}'].option} and {chosen} exclude each other: choose one scaling"
    if model.rope_scaling_factor < 1:
        yield f"--rope-scaling-factor {model.rope_scaling_factor}: {chosen} takes a number of at least 1"
    if kind == "yarn":
        yield from _yarn_problems(model)
    elif kind == "dynamic" and rotated == 2:
        yield f"{chosen} needs at least 4 rotated channels of a head (--kv-channels, --rotary-percent), not 2"
    elif kind == "longrope":
        yield from _longrope_problems(model, rotated)


def _yarn_problems(model: ModelConfig) -> Iterator[str]:
    if model.rotary_base <= 1:
        yield f"--rotary-base {model.rotary_base}: --position-embedding-type yarn takes a number above 1"
    fast, slow = yarn_turns(model)
    if fast < slow:
        yield f"--yarn-beta-fast {fast} is below --yarn-beta-slow {slow}"
    if (model.yarn_mscale is None) != (model.yarn_mscale_all_dim is None):
        yield "--yarn-mscale and --yarn-mscale-all-dim need each other: give both or neither"
    if model.yarn_mscale is not None and model.rope_attention_factor is not None:
        yield "--rope-attention-factor and --yarn-mscale exclude each other: both decide the attention factor"


def yarn_turns(model: ModelConfig) -> tuple[float, float]:
    """Rotations in the original length above which a pair isn't scaled, and below which it is scaled by the whole
    factor (Peng et al. 2023)."""
    return (
        32.0 if model.yarn_beta_fast is None else model.yarn_beta_fast,
        1.0 if model.yarn_beta_slow is None else model.yarn_beta_slow,
    )


def _longrope_problems(model: ModelConfig, rotated: int | None) -> Iterator[str]:
    if model.rope_original_max_position_embeddings < 2:
        yield "--rope-original-max-position-embeddings 1: --position-embedding-type longrope takes at least 2"
    for name in _LISTS:
        option, values = all_fields()[f"model.{name}"].option, getattr(model, name)
        if values is None:
            yield f"{option} is missing: --position-embedding-type longrope has one number for each rotated pair"
        elif rotated is not None and len(values) != rotated // 2:
            yield f"{option} has {len(values)} numbers, but {rotated // 2} pairs of a head's channels are rotated"
