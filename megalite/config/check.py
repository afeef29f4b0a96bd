"""Everything that can be wrong with a configuration, found before any process group exists.

Key idea: a setting is honoured or refused, never ignored. `check` finds what could not run anywhere, `without_effect`
what is set but changes nothing. Both return plain lines for the user.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.check_experts import expert_problems, idle_of_experts
from megalite.config.check_finetune import finetune_problems, idle_beside_sft_data
from megalite.config.check_latent import multi_token_problems
from megalite.config.check_network import idle_scaling, layout_problems, model_problems
from megalite.config.check_peft import idle_beside_adapters, peft_problems
from megalite.config.check_precision import idle_formats, precision_problems
from megalite.config.check_run import (
    STATE_DTYPES,
    batch_problems,
    checkpoint_problems,
    data_problems,
    learning_rate_problems,
    optimizer_problems,
    reporting_problems,
    tokenizer_problems,
    training_problems,
)
from megalite.config.fields import Field, all_fields, get, given, value_problems
from megalite.config.schema import RunConfig


def check(config: RunConfig, world_size: int) -> list[str]:
    """All problems of a configuration, given or resolved, in a world of so many processes; empty: it can run.

    Each line names the flag, its value and what would be valid.
    """
    values = list(value_problems(config))
    if values:
        return values  # what follows divides by these numbers
    return [
        *_missing(config),
        *model_problems(config),
        *multi_token_problems(config),
        *layout_problems(config, world_size),
        *expert_problems(config, world_size),
        *precision_problems(config),
        *batch_problems(config, world_size),
        *training_problems(config),
        *optimizer_problems(config),
        *learning_rate_problems(config),
        *(data_problems(config) if config.finetune.sft_data is None else ()),
        *finetune_problems(config),
        *peft_problems(config),
        *tokenizer_problems(config.tokenizer),
        *checkpoint_problems(config),
        *reporting_problems(config),
    ]


def without_effect(config: RunConfig) -> list[str]:
    """One line for each setting that was made but can't matter beside the others."""
    return [f"{shown} has no effect {why}" for why, paths in _idle_settings(config) for shown in given(config, *paths)]


def _idle_settings(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    yield from idle_formats(config.precision)
    kind = config.tokenizer.tokenizer_type
    if kind is not None and kind != "TikTokenizer":
        yield f"with --tokenizer-type {kind}", ["tokenizer.tiktoken_pattern"]
    if kind is not None and kind != "GPT2BPETokenizer":
        yield f"with --tokenizer-type {kind}", ["tokenizer.vocab_file", "tokenizer.merge_file"]
    if kind in ("GPT2BPETokenizer", "NullTokenizer"):
        yield f"with --tokenizer-type {kind}", ["tokenizer.tokenizer_model"]
    if not config.optimizer.optimizer_cpu_offload:
        yield "without --optimizer-cpu-offload", ["optimizer.optimizer_offload_fraction"]
    if config.optimizer.optimizer != "sgd":
        yield "without --optimizer sgd", ["optimizer.sgd_momentum"]
    if config.optimizer.optimizer != "adam":
        yield "without --optimizer adam", ["optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps"]
    if not given(config, *STATE_DTYPES):
        yield "without a format other than fp32 for some state", ["precision.use_precision_aware_optimizer"]
    if config.logging.tensorboard_dir is None:
        yield "without --tensorboard-dir", ["logging.tensorboard_log_interval", "logging.log_memory_to_tensorboard"]
        if config.logging.metrics_file is None:
            yield "without --metrics-file or --tensorboard-dir", ["logging.log_fp8_stats"]
    yield from idle_of_experts(config)
    if config.model.mtp_loss_scaling_factor == 0:
        yield "with --mtp-loss-scaling-factor 0: these layers learn nothing", ["model.mtp_num_layers"]
    if not config.logging.profile:
        yield "without --profile", ["logging.profile_step_start", "logging.profile_step_end"]
    for name, users in idle_scaling(config.model).items():
        yield f"without {' or '.join(users)}", [f"model.{name}"]
    checkpoint, rate = config.checkpoint, config.learning_rate
    if checkpoint.save is None or config.validation.skip_train:
        yield "without --save or with --skip-train", ["checkpoint.save_optim", "checkpoint.save_rng"]
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        names = ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
        yield "without --load", ["checkpoint.load_optim", "checkpoint.load_rng", *(f"learning_rate.{n}" for n in names)]
    if not (rate.lr_warmup_iters or rate.lr_warmup_samples or rate.lr_warmup_fraction):
        yield "without warm-up", ["learning_rate.lr_warmup_init"]
    if rate.lr_decay_style == "constant":
        names = ["min_lr", "lr_decay_iters", "lr_decay_samples", "decoupled_min_lr"]
        yield "with --lr-decay-style constant", [f"learning_rate.{name}" for name in names]
    if config.layout.pipeline_model_parallel_size == 1:
        yield "with --pipeline-model-parallel-size 1", ["layout.pipeline_schedule"]
    if config.validation.eval_iters == 0:
        yield "with --eval-iters 0", ["validation.eval_interval", "validation.full_validation"]
    if config.data.mock_data:
        yield "with --mock-data", ["data.split", "data.data_cache_path", "data.mmap_bin_files"]
    yield from idle_beside_sft_data(config)
    yield from idle_beside_adapters(config)
    if config.learning_rate.lr_decay_style != "WSD":
        yield "without --lr-decay-style WSD", ["learning_rate.lr_wsd_decay_style"]


def missing_fields(config: RunConfig) -> list[Field]:
    """The needed fields that nothing gave; the learning rate where something is trained."""
    without = "learning_rate.lr" if config.validation.skip_train else None
    needed = (each for each in all_fields().values() if each.needed and each.path != without)
    return [each for each in needed if get(config, each.path) is None]


def _missing(config: RunConfig) -> Iterator[str]:
    for field in missing_fields(config):
        preset = " (or --preset, which gives the network)" if field.section == "model" else ""
        yield f"{field.option} is missing{preset}"
