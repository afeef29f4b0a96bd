"""Derived defaults: from what was given to what runs.

`resolve` returns a new configuration in which nothing that the model or the loop needs is None, with the defaults that
Megatron-LM derives. Resolving twice changes nothing. What only a machine knows (device, backend, threads) stays open.
"""

from __future__ import annotations

import copy
import re

from megalite.config.batches import batch_size_stages
from megalite.config.fields import all_fields, get, given, put
from megalite.config.schema import LayoutConfig, ModelConfig, RunConfig

DEFAULT_SPLIT = "969,30,1"
DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # as Megatron-LM's pretrain_gpt.py


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """A new configuration with all derived defaults, for a run that `check` finds nothing wrong with.

    `world_size`: processes in all. Values that are still missing after `check` failed stay None.
    """
    resolved, _ = drop_idle(config, world_size)
    _resolve_model(resolved)
    _resolve_layout(resolved)
    _resolve_training(resolved, world_size)
    _resolve_data(resolved)
    return resolved


def data_parallel_size(layout: LayoutConfig, world_size: int) -> int:
    """Ranks that hold the same parameters: the world over TP x PP x CP. 0 where that doesn't divide it."""
    model_parallel = (
        layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    )
    return world_size // model_parallel if model_parallel > 0 and world_size % model_parallel == 0 else 0


def most_copies(layout: LayoutConfig, world_size: int) -> int:
    """Ranks that share out the parameters of which there are most copies: the dense ones or the experts. 0 where the
    sizes don't divide the world."""
    ranks = data_parallel_size(layout, world_size) * layout.context_parallel_size
    tensor = layout.tensor_model_parallel_size
    grid = layout.expert_model_parallel_size * (layout.expert_tensor_parallel_size or tensor)
    return max(ranks, ranks * tensor // max(grid, 1))


def context_exchange(layout: LayoutConfig) -> str:
    """What context-parallel ranks exchange, in every layer."""
    return (layout.cp_comm_type or ["p2p"])[0]


def heads_exchanged(layout: LayoutConfig) -> int:
    """How many neighbouring context-parallel ranks exchange heads; the others exchange keys and values."""
    exchange, sizes = context_exchange(layout), layout.hierarchical_context_parallel_sizes
    if exchange == "a2a":
        return layout.context_parallel_size
    return sizes[0] if exchange == "a2a+p2p" and sizes else 1


def shards(config: RunConfig) -> bool:
    """Whether data-parallel ranks share out state."""
    layout = config.layout
    return layout.use_distributed_optimizer or layout.data_parallel_sharding_strategy not in (None, "no_shard")


def drop_idle(config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """A copy with settings that can't matter in this layout put back to their defaults, and a line for each.

    Megatron-LM's launch scripts carry such flags: sequence parallelism without tensor parallelism, sharding over one
    data-parallel rank. They would cost nothing and change nothing.
    """
    idle: dict[str, list[str]] = {}
    if config.layout.tensor_model_parallel_size == 1:
        idle["with --tensor-model-parallel-size 1"] = ["layout.sequence_parallel"]
    if config.layout.context_parallel_size == 1:
        idle["with --context-parallel-size 1"] = ["layout.cp_comm_type", "layout.hierarchical_context_parallel_sizes"]
    if most_copies(config.layout, world_size) == 1:
        idle["with one data-parallel rank"] = [
            "layout.use_distributed_optimizer",
            "layout.data_parallel_sharding_strategy",
            "layout.overlap_grad_reduce",
            "layout.overlap_param_gather",
            "layout.ddp_bucket_size",
        ]
    fields, copied, lines = all_fields(), copy.deepcopy(config), []
    for why, paths in idle.items():
        for path in paths:
            if get(copied, path) != "no_shard":
                lines += [f"{shown} has no effect {why}" for shown in given(copied, path)]
                put(copied, path, fields[path].default)
    return copied, lines


def parse_split(text: str) -> list[float]:
    """`969,30,1` → three weights, zeros where fewer were given. A ValueError says what is wrong.

    Quotes and blanks are dropped: launch scripts that keep flags in shell arrays pass them on.
    """
    words = [word.strip() for word in re.split("[,/]", text.strip().strip("'\""))]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise ValueError(f"{text} is not three numbers such as {DEFAULT_SPLIT}") from None
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < float("inf") for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"{text} must be one to three weights, none negative and not all 0, such as {DEFAULT_SPLIT}")
    return weights + [0.0] * (3 - len(weights))


def parse_window(text: str) -> tuple[int, int]:
    """`LEFT,RIGHT`, with or without brackets → tokens visible before and after; -1: no bound. A ValueError says why
    not."""
    try:
        left, right = (int(part) for part in text.strip("() ").split(","))
    except ValueError:
        raise ValueError(f"{text} must be LEFT,RIGHT, such as 128,0") from None
    return left, right


def head_widths(model: ModelConfig) -> tuple[int, int]:
    """Of a resolved network: width of a head's queries and keys, and of its values."""
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    return model.kv_channels, model.kv_channels


def rotated_head(model: ModelConfig) -> int | None:
    """Channels of a head of which `--rotary-percent` are rotated; None where they aren't known."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    if model.kv_channels is None and model.hidden_size is not None and model.num_attention_heads:
        return model.hidden_size // model.num_attention_heads
    return model.kv_channels


def ffn_width(model: ModelConfig) -> int | None:
    """Width inside the MLP, given or derived; None where the hidden size is missing too."""
    if model.ffn_hidden_size is not None or model.hidden_size is None:
        return model.ffn_hidden_size
    wide = 4 * model.hidden_size
    return int((wide * 2 / 3) / 64) * 64 if model.swiglu else wide


def balancing(model: ModelConfig) -> dict[str, float]:
    """How tokens are spread over the experts, each with the weight of its loss."""
    kinds = model.moe_router_load_balancing_type or ["aux_loss"]
    return dict(zip(kinds, model.moe_aux_loss_coeff or [0.0] * len(kinds), strict=False))


def expert_layers(model: ModelConfig) -> list[bool]:
    """Which layers have experts. A ValueError says what is wrong with --moe-layer-freq."""
    layers = model.num_layers
    if model.num_experts is None:
        return [False] * layers
    text = model.moe_layer_freq.strip().strip("'\"")
    if text.isdecimal() and int(text) > 0:
        return [number % int(text) == 0 for number in range(layers)]
    terms = _layer_terms(text)
    count = sum(len(flags) * times for flags, times in terms)
    if count != layers:  # before the list is made: it may be longer than memory
        raise ValueError(f"{text} is about {count} layers, but --num-layers is {layers}")
    return [flag for flags, times in terms for flag in flags * times]


def _layer_terms(text: str) -> list[tuple[list[bool], int]]:
    """Lists of 0 and 1, each with how often it is repeated (*); they are joined (+), such as [0]*3+[1]*58."""
    terms: list[tuple[list[bool], int]] = []
    for term in "".join(text.split()).split("+"):
        found = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d+))?\)?(?:\*(\d+))?", term)
        if found is None:
            raise ValueError(f"{text} must be a number above 0, or lists of 0 and 1 such as [0]*3+[1]*58")
        terms.append(([digit == "1" for digit in found[1].split(",")], int(found[2] or 1) * int(found[3] or 1)))
    return terms


def _resolve_model(config: RunConfig) -> None:
    model = config.model
    if (width := ffn_width(model)) is not None:
        model.ffn_hidden_size = width
        if model.num_experts is not None and model.moe_ffn_hidden_size is None:
            model.moe_ffn_hidden_size = width
    if model.moe_router_group_topk and model.moe_router_group_score_topk is None:
        model.moe_router_group_score_topk = model.moe_router_topk // model.moe_router_group_topk
    if model.num_attention_heads:
        if model.multi_latent_attention:
            model.kv_channels = head_widths(model)[0]
        elif model.kv_channels is None and model.hidden_size is not None:
            model.kv_channels = model.hidden_size // model.num_attention_heads
        if not model.group_query_attention:
            model.num_query_groups = model.num_attention_heads
    if model.max_position_embeddings is None and model.position_embedding_type != "learned_absolute":
        model.max_position_embeddings = config.data.seq_length
    if model.add_bias_linear and not model.multi_latent_attention:
        model.add_qkv_bias = True
    if model.window_size is not None:
        left, right = parse_window(model.window_size)
        model.window_size = f"{left},{right}"


def _resolve_layout(config: RunConfig) -> None:
    layout = config.layout
    if layout.data_parallel_sharding_strategy is None:
        layout.data_parallel_sharding_strategy = "optim" if layout.use_distributed_optimizer else "no_shard"
    if layout.num_virtual_stages_per_pipeline_rank is None:
        layout.num_virtual_stages_per_pipeline_rank = virtual_stages(config)
    if layout.pipeline_schedule == "auto":
        interleaved = layout.num_virtual_stages_per_pipeline_rank > 1
        layout.pipeline_schedule = "interleaved" if interleaved else "1f1b"


def pipeline_units(config: RunConfig) -> int:
    """Layers to cut into stages, with the embedding and the output layer where they count as one."""
    layout = config.layout
    counted = layout.account_for_embedding_in_pipeline_split + layout.account_for_loss_in_pipeline_split
    return (config.model.num_layers or 0) + counted


def virtual_stages(config: RunConfig) -> int:
    """Model chunks per pipeline rank, from either of its two flags; 1 where none was given."""
    layout = config.layout
    if layout.num_virtual_stages_per_pipeline_rank is not None:
        return layout.num_virtual_stages_per_pipeline_rank
    per_chunk = layout.num_layers_per_virtual_pipeline_stage
    if not per_chunk:
        return 1
    return max(pipeline_units(config) // (max(layout.pipeline_model_parallel_size, 1) * per_chunk), 1)


def _resolve_training(config: RunConfig, world_size: int) -> None:
    training, rate, optimizer = config.training, config.learning_rate, config.optimizer
    if training.step_batch_size_schedule:
        training.global_batch_size = batch_size_stages(training, config.data.seq_length)[-1][1]
    elif training.global_batch_size is None and training.micro_batch_size is not None:
        training.global_batch_size = training.micro_batch_size * data_parallel_size(config.layout, world_size)
    if training.recompute_activations:
        training.recompute_granularity = "selective"
    if training.nan_action is None:
        training.nan_action = "skip" if config.precision.fp16 else "stop"
    if config.validation.skip_train:  # nothing is trained, so these need not be given, but a schedule is made
        if training.train_iters is None and training.train_samples is None:
            training.train_iters = 1
        rate.lr = rate.min_lr if rate.lr is None else rate.lr
    if rate.lr_decay_iters is None:
        rate.lr_decay_iters = training.train_iters
    if rate.lr_decay_samples is None:
        rate.lr_decay_samples = training.train_samples
    if rate.decoupled_lr is not None and rate.decoupled_min_lr is None:
        rate.decoupled_min_lr = rate.min_lr
    if optimizer.weight_decay_incr_style == "constant":
        optimizer.start_weight_decay = optimizer.end_weight_decay = optimizer.weight_decay


def _resolve_data(config: RunConfig) -> None:
    data = config.data
    per_split = data.train_data_path or data.valid_data_path or data.test_data_path
    if data.split is not None:
        data.split = ",".join(repr(weight).removesuffix(".0") for weight in parse_split(data.split))
    elif not per_split:
        data.split = DEFAULT_SPLIT
    if data.dataloader_type is None:
        data.dataloader_type = "single" if config.finetune.sft_data is None else "cyclic"
    if config.finetune.task is None:
        config.finetune.task = "lm" if config.finetune.sft_data is None else "sft"
    if config.tokenizer.tokenizer_type is None:
        config.tokenizer.tokenizer_type = DEFAULT_TOKENIZER
