"""The configurations that a proof runs: in float64 on CPUs, in any layout or in none."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

from megalite.config.check import check
from megalite.config.errors import refuse
from megalite.config.fields import all_fields, put
from megalite.config.resolve import resolve
from megalite.config.schema import CheckpointConfig, LayoutConfig, LoggingConfig, RunConfig
from megalite.training.prepare import run_problems

WHERE_NOT_HOW = ("device", "threads_per_rank", "distributed_backend", "distributed_timeout_minutes")


def for_proof(config: RunConfig, steps: int) -> RunConfig:
    """The same computation in float64 on CPUs, one thread a rank, from the same weights; it resumes and writes
    nothing."""
    config = copy.deepcopy(config)
    config.precision = replace(
        config.precision, bf16=False, fp16=False, fp64=True, grad_reduce_in_bf16=False, fp8_backend="auto"
    )
    config.precision.main_grads_dtype = "fp32"
    config.layout.device, config.layout.threads_per_rank, config.layout.distributed_backend = "cpu", 1, None
    for field in all_fields().values():
        if field.writes:
            put(config, field.path, None)
    config.checkpoint, config.logging = _starting_weights(config.checkpoint), LoggingConfig()
    config.finetune.eval_prompt = None
    config.data.num_workers = 0
    config.validation.eval_iters = 0
    config.finetune.train_epochs = None
    if config.training.train_samples is None:
        config.training.train_iters = max(steps, config.training.train_iters or 0)
    config.training.nan_action = "stop"
    # Fused kernels drop out from a stream of their own, and their choice is the GPU's: the plain one is the proof.
    config.model.attention_backend = "unfused" if config.model.attention_dropout else "auto"
    return config


def _starting_weights(given: CheckpointConfig) -> CheckpointConfig:
    kept = CheckpointConfig(pretrained_checkpoint=given.pretrained_checkpoint)
    if given.finetune:  # --load with the weights alone
        kept.load, kept.ckpt_step, kept.finetune = given.load, given.ckpt_step, True
    return kept


def on_one_process(config: RunConfig) -> RunConfig:
    """Without any layout, schedule, recompute or compiled code: the truth."""
    config = copy.deepcopy(config)
    config.precision.fp8_param_gather = False  # there are no shards to gather
    config.training.compile = False
    kept = {name: getattr(config.layout, name) for name in WHERE_NOT_HOW}
    config.layout = LayoutConfig(**kept)
    for field in fields(config.training):
        if field.name.startswith("recompute_"):
            setattr(config.training, field.name, field.default)
    return config


def checked(config: RunConfig, world_size: int) -> RunConfig:
    """With all derived values; a FlagError says what is wrong with the flags. Schedules are not looked at."""
    refuse(check(config, world_size))
    return resolve(config, world_size)


def resolved(config: RunConfig, world_size: int) -> RunConfig:
    """As `checked`; also the length of the run and its schedule's microbatches are right."""
    result = checked(config, world_size)
    refuse(run_problems(result, world_size))
    return result
