"""What a single field may be: choices, bounds, finite numbers. Combinations of fields are `check.py`'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config.fields import Field, all_fields, get
from megalite.config.schema import RunConfig


@dataclass(frozen=True)
class Bound:
    """What must hold of a number in each of the fields with these paths."""

    rule: str
    holds: Callable[[float], bool]
    paths: frozenset[str]


def _paths(text: str) -> frozenset[str]:
    return frozenset(text.split())


BOUNDS = (
    Bound(
        "must be at least 1",
        lambda value: value >= 1,
        _paths("""
        model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.kv_channels
        model.num_query_groups model.max_position_embeddings model.make_vocab_size_divisible_by
        model.rotary_seq_len_interpolation_factor model.rope_original_max_position_embeddings model.model_vocab_size
        layout.tensor_model_parallel_size layout.pipeline_model_parallel_size layout.context_parallel_size
        layout.expert_model_parallel_size layout.num_layers_per_virtual_pipeline_stage
        layout.num_virtual_stages_per_pipeline_rank layout.microbatch_group_size_per_virtual_pipeline_stage
        layout.ddp_bucket_size layout.threads_per_rank
        training.micro_batch_size training.global_batch_size training.train_iters training.train_samples
        training.exit_interval training.recompute_num_layers training.max_skips_in_a_row
        learning_rate.lr_decay_iters learning_rate.lr_decay_samples learning_rate.lr_wsd_decay_iters
        learning_rate.lr_wsd_decay_samples
        precision.loss_scale_window precision.hysteresis precision.fp8_amax_history_len
        data.seq_length tokenizer.vocab_size
        checkpoint.save_interval checkpoint.save_retain_interval checkpoint.keep_last_checkpoints checkpoint.ckpt_step
        validation.eval_interval logging.log_interval logging.tensorboard_log_interval
        peft.lora_rank peft.num_virtual_tokens peft.prefix_hidden_size finetune.train_epochs
        """),
    ),
    Bound(
        "must not be negative",
        lambda value: value >= 0,
        _paths("""
        model.init_method_std layout.decoder_first_pipeline_num_layers layout.decoder_last_pipeline_num_layers
        optimizer.weight_decay optimizer.start_weight_decay optimizer.end_weight_decay optimizer.clip_grad
        learning_rate.lr learning_rate.decoupled_lr learning_rate.min_lr learning_rate.decoupled_min_lr
        learning_rate.lr_warmup_iters learning_rate.lr_warmup_samples learning_rate.lr_warmup_init
        precision.fp8_margin data.num_workers
        validation.eval_iters logging.profile_step_start logging.log_top_grad_norms
        """),
    ),
    Bound(
        "must be above 0",
        lambda value: value > 0,
        _paths("""
        model.rotary_base model.rope_scaling_factor model.rope_low_freq_factor model.rope_high_freq_factor
        model.rope_attention_factor model.yarn_beta_fast model.yarn_beta_slow model.yarn_mscale
        model.yarn_mscale_all_dim model.longrope_short_factor model.longrope_long_factor
        model.norm_epsilon
        layout.distributed_timeout_minutes training.exit_duration_in_mins
        optimizer.adam_eps
        precision.loss_scale precision.initial_loss_scale precision.min_loss_scale
        peft.lora_alpha
        """),
    ),
    Bound(
        "must be from 0 to below 1",
        lambda value: 0 <= value < 1,
        _paths("""
        model.hidden_dropout model.attention_dropout model.label_smoothing
        optimizer.adam_beta1 optimizer.adam_beta2 optimizer.sgd_momentum learning_rate.lr_warmup_fraction
        finetune.sft_valid_share peft.lora_dropout
        """),
    ),
    Bound("must be from 0 to 1", lambda value: 0 <= value <= 1, _paths("optimizer.optimizer_offload_fraction")),
    Bound("must be above 0 and at most 1", lambda value: 0 < value <= 1, _paths("model.rotary_percent")),
    Bound("must be from 0 to 4294967295", lambda value: 0 <= value < 2**32, _paths("training.seed")),
)


def problems_of_values(config: RunConfig) -> Iterator[str]:
    """Every field whose value is out of its own bounds."""
    for field in all_fields().values():
        value = get(config, field.path)
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield from _problems_of_value(field, item)


def _problems_of_value(field: Field, value: Any) -> Iterator[str]:
    shown = field.show(value)
    if field.choices and value not in field.choices:
        yield f"{shown}: not one of {', '.join(str(choice) for choice in field.choices)}"
    elif field.kind is str and not str(value).strip():
        yield f"{field.option} is empty: leave it out or give it a value"
    elif field.kind in (int, float) and not math.isfinite(value):
        yield f"{shown}: not a finite number"
    elif field.kind in (int, float):
        for bound in BOUNDS:
            if field.path in bound.paths and not bound.holds(value):
                yield f"{shown}: {bound.rule}"
