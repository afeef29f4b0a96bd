"""Small runs in place of big ones: network, layout, batch and data of the same structure, in seconds on CPUs.

Key idea: a fault of a layout shows as soon as an axis is there at all, so each axis keeps the least that shows it.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

from megalite.config.check_precision import FP8_BLOCKS, cut_blocks
from megalite.config.errors import FlagError
from megalite.config.resolve import (
    context_exchange,
    head_widths,
    heads_exchanged,
    parse_window,
    pipeline_units,
    shards,
    virtual_stages,
)
from megalite.config.schema import CheckpointConfig, LayoutConfig, RunConfig, TokenizerConfig
from megalite.config.schema_finetune import FinetuneConfig
from megalite.verify.configs import WHERE_NOT_HOW
from megalite.verify.layouts import Variant
from megalite.verify.replace import use_made_data

_VIRTUAL = ("prefix", "prompt")
_SMALL_VOCABULARY = 130
_SAMPLES = 64

_TENSOR, _STAGES, _CHUNKS = 2, 4, 2  # four stages: the first, the last, and two that pass on to each other
_LAPTOP = 8  # processes


def small_layout(config: RunConfig) -> LayoutConfig:
    """The least of each axis that still shows it. `config`: filled, maybe unresolved.

    Tensor parallelism keeps two ranks, or four where ranks share one of several key/value heads; pipelines keep up to
    four stages, two where eight processes allow no more; virtual stages two chunks; context parallelism two ranks, or
    four where they exchange heads and then keys; expert parallelism two.
    """
    layout, model = copy.deepcopy(config.layout), config.model
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads or 1
    shares_heads = layout.tensor_model_parallel_size > groups > 1
    layout.tensor_model_parallel_size = min(layout.tensor_model_parallel_size, 2 * _TENSOR if shares_heads else _TENSOR)
    layout.context_parallel_size = min(layout.context_parallel_size, 2)
    if context_exchange(layout) == "a2a+p2p":
        layout.context_parallel_size, layout.hierarchical_context_parallel_sizes = 4, [2, 2]
    layout.expert_model_parallel_size = min(layout.expert_model_parallel_size, 2)
    if layout.expert_tensor_parallel_size is not None:
        layout.expert_tensor_parallel_size = min(layout.expert_tensor_parallel_size, 2)
    others = layout.tensor_model_parallel_size * layout.context_parallel_size * (2 if shards(config) else 1)
    stages = _STAGES if others * _STAGES <= _LAPTOP else 2
    chunks = min(virtual_stages(config), _CHUNKS)
    layout.pipeline_model_parallel_size = min(layout.pipeline_model_parallel_size, stages)
    layout.num_layers_per_virtual_pipeline_stage = None
    layout.num_virtual_stages_per_pipeline_rank = chunks if chunks > 1 else None
    return layout


def shrink(
    config: RunConfig, data_parallel_size: int, folder: Path | None = None, layout: LayoutConfig | None = None
) -> RunConfig:
    """A network and batch of seconds in place of the given, with the same structure: kinds of layer, ratio of heads to
    groups, positions, biases, dropout, kind of adapter and its targets. Random weights; data from a rule, that of
    fine-tuning in `folder`. `config`: resolved. `layout`: in place of the given; None: that, with the same chunks."""
    given, config = config, copy.deepcopy(config)
    if layout is not None:
        config.layout = copy.deepcopy(layout)
    model, training, rate = config.model, config.training, config.learning_rate
    tp, pp = config.layout.tensor_model_parallel_size, config.layout.pipeline_model_parallel_size
    _small_heads(config, copied=given.layout.tensor_model_parallel_size > model.num_query_groups)
    _small_stages(config, given)
    small_experts(config)
    cp, block = config.layout.context_parallel_size, FP8_BLOCKS.get(config.precision.fp8_recipe, 1)
    _small_batch(config, max(16 * tp * cp, 2 * cp * block if cp > 1 else 0), folder)
    _fit_blocks(config, tp)
    _fit_edges(config)
    config.precision.fp8_param_gather &= shards(config)  # one data-parallel rank gathers nothing
    training.micro_batch_size = min(training.micro_batch_size or 1, 2)
    training.global_batch_size = training.micro_batch_size * data_parallel_size * 2 * pp
    # In the few steps of a proof a warm-up of a real run's length would leave the weights where they are.
    rate.lr_warmup_iters, rate.lr_warmup_samples, rate.lr_warmup_fraction = 0, 0, None
    return config


def _small_heads(config: RunConfig, *, copied: bool) -> None:
    """Few heads of width 8. `copied`: more tensor-parallel ranks than key/value heads, which hold copies of them."""
    model, tp = config.model, config.layout.tensor_model_parallel_size
    share = min(model.num_attention_heads // model.num_query_groups, 4)
    groups = min(model.num_query_groups, max(tp, 2))
    if copied:
        groups = min(groups, max(tp // 2, 1))
        ranks = tp // groups  # that hold one key/value head
        share = -(-share // ranks) * ranks
    exchanged = heads_exchanged(config.layout)
    while groups * share // tp % exchanged:
        share *= 2
    heads = groups * share
    model.num_attention_heads, model.num_query_groups = heads, groups
    model.hidden_size, model.kv_channels, model.ffn_hidden_size = 8 * heads, 8, 3 * 8 * heads
    _small_latents(config)
    model.mtp_num_layers = None if model.mtp_num_layers is None else min(model.mtp_num_layers, 2)


def _small_latents(config: RunConfig) -> None:
    """With multi-latent attention, widths that all differ."""
    model = config.model
    if model.multi_latent_attention:
        model.q_lora_rank = None if model.q_lora_rank is None else 20
        model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim = 12, 6, 4, 5
        model.kv_channels = head_widths(model)[0]


def small_experts(config: RunConfig) -> None:
    """Eight experts, or twelve in four groups; of a pattern of layers the first layer without and the others with."""
    model, layout = config.model, config.layout
    if model.num_experts is None:
        return
    model.num_experts, model.moe_ffn_hidden_size = min(8, max(2, model.num_experts)), 16
    if model.moe_router_num_groups is not None:
        model.num_experts, model.moe_router_num_groups, model.moe_router_group_topk = 12, 4, 2
        model.moe_router_topk = 4
    ep = layout.expert_model_parallel_size
    model.num_experts = -(-model.num_experts // ep) * ep
    model.moe_router_topk = min(model.moe_router_topk, 4, model.num_experts)
    if model.moe_shared_expert_intermediate_size is not None:
        model.moe_shared_expert_intermediate_size = 24
    if not model.moe_layer_freq.strip().isdigit():
        model.moe_layer_freq = f"[0]+[1]*{model.num_layers - 1}"


def _fit_blocks(config: RunConfig, tp: int) -> None:
    """With FP8 widen what tensor parallelism would cut inside a block of elements that share a scale."""
    model, recipe = config.model, config.precision.fp8_recipe
    if config.precision.fp8_format is None or not cut_blocks(model, recipe, tp):
        return
    multiple = tp * FP8_BLOCKS[recipe]
    model.ffn_hidden_size = -(-model.ffn_hidden_size // multiple) * multiple
    while cut_blocks(model, recipe, tp):
        model.kv_channels, model.hidden_size = 2 * model.kv_channels, 2 * model.hidden_size


def _fit_edges(config: RunConfig) -> None:
    """Leave a layer for FP8 where the first and last ones that compute without it would be all: then at most one at
    each end has none."""
    precision, layers = config.precision, config.model.num_layers or 0
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and start + end >= layers:
        start = min(start, 1)
        precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16 = (
            start,
            min(end, 1, layers - 1 - start),
        )


def _small_stages(config: RunConfig, given: RunConfig) -> None:
    """Two layers a chunk; on a first or last stage of a length of its own one or three, as it was shorter or longer."""
    layout, chunks = config.layout, virtual_stages(config)
    stages = layout.pipeline_model_parallel_size
    names = [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    ends = {name: getattr(given.layout, name) for name in names if getattr(given.layout, name) is not None}
    counted = pipeline_units(given) - (given.model.num_layers or 0)
    if ends:
        rest, between = (given.model.num_layers or 0), given.layout.pipeline_model_parallel_size - len(ends)
        usual = (rest - sum(ends.values())) / between if between else rest / len(ends)
        for name, count in ends.items():
            ends[name] = chunks * (2 + (count > usual) - (count < usual)) if count else 0
            setattr(layout, name, ends[name])
    config.model.num_layers = sum(ends.values()) + 2 * chunks * (stages - len(ends)) - counted
    layout.num_layers_per_virtual_pipeline_stage = None
    layout.num_virtual_stages_per_pipeline_rank = chunks if chunks > 1 else None


def _small_batch(config: RunConfig, length: int, folder: Path | None) -> None:
    """Sequences of `length` tokens from a rule, and a constant batch size."""
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=_SMALL_VOCABULARY)
    _small_finetuning(config, length, folder)
    if config.finetune.sft_data is None:
        use_made_data(config, _SMALL_VOCABULARY)
    config.data.seq_length = length
    virtual = config.peft.num_virtual_tokens if config.peft.peft in _VIRTUAL else 0
    config.model.max_position_embeddings, config.model.model_vocab_size = length + virtual, None
    if config.model.window_size is not None and parse_window(config.model.window_size)[0] >= 0:
        config.model.window_size = f"{length // 4},0"  # narrow enough to matter
    config.model.make_vocab_size_divisible_by = min(config.model.make_vocab_size_divisible_by, 8)
    config.training.rampup_batch_size = config.training.step_batch_size_schedule = None
    config.layout.microbatch_group_size_per_virtual_pipeline_stage = None


def _small_finetuning(config: RunConfig, length: int, folder: Path | None) -> None:
    """Weights from nowhere, samples from a rule in `folder`, and an adapter of the same kind."""
    given, peft = config.finetune, config.peft
    if peft.load_adapter is not None:
        raise FlagError(
            f"--load-adapter {peft.load_adapter} doesn't fit a small network: give its kind (--peft) and targets "
            "(--lora-target-modules) instead"
        )
    config.checkpoint, config.finetune = CheckpointConfig(), FinetuneConfig(task=given.task)
    config.model.moe_use_upcycling = False
    if given.sft_data is not None:
        assert folder is not None
        path = write_samples(folder, given.task or "sft", length=length, vocab_size=_SMALL_VOCABULARY)
        config.finetune.sft_data, config.finetune.sft_packing = [path], given.sft_packing
    if peft.peft in _VIRTUAL:  # with sequence parallelism a prompt is cut over up to so many ranks
        peft.num_virtual_tokens = 4 * config.layout.tensor_model_parallel_size
    if peft.prompt_init_text is not None:
        peft.prompt_init_text = "3 1 4"


def write_samples(folder: Path, task: str, *, length: int, vocab_size: int) -> str:
    """Write a file of prompts and completions, or with the task `classification` of texts and three labels, into
    `folder`; its path. Texts have up to `length` tokens, end of document included, and ids below `vocab_size`.

    Texts are ids in decimal, NullTokenizer's words, of many lengths: so batches are cut to their longest sample, packs
    hold several, and microbatches differ in how many of their tokens count.
    """
    draw = random.Random(f"{task} {length}")

    def words(longest: int) -> str:
        return " ".join(str(draw.randrange(vocab_size)) for _ in range(draw.randint(1, longest)))

    path = folder / f"{task}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(_SAMPLES):
            if task == "classification":
                sample = {"text": words(length), "label": number % 3}
            else:
                sample = {"prompt": words(length // 2), "completion": f" {words(length // 2 - 1)}"}
            file.write(json.dumps(sample) + "\n")
    return str(path)


def for_matrix(config: RunConfig, variant: Variant, folder: Path | None = None) -> RunConfig:
    """A small network of the given kinds of layer, for one process or `variant`, with the least that shows that layout:
    a layer a chunk, at least two, and two microbatches a stage.

    Grouped queries get two groups, fewer than TP 4, so that keys and values are copied there. `folder`: as in `shrink`.
    """
    config = copy.deepcopy(config)
    model = config.model
    config.layout = LayoutConfig(**{name: getattr(config.layout, name) for name in WHERE_NOT_HOW})
    model.num_layers, model.num_attention_heads, model.hidden_size = max(2, variant.pp * variant.chunks), 4, 32
    model.num_query_groups = 2 if model.group_query_attention else 1
    model.ffn_hidden_size, model.kv_channels = 96, 8
    _small_latents(config)
    small_experts(config)
    _fit_blocks(config, variant.tp)
    _fit_edges(config)
    _small_batch(config, 16, folder)
    config.training.micro_batch_size, config.training.global_batch_size = 1, 2 * variant.pp * variant.dp
    return config
