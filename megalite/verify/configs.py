"""The configurations that a proof runs: in float64 on CPUs, cut down on request, in any layout or in none."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path

from megalite.config.check import check, not_built
from megalite.config.errors import FlagError
from megalite.config.resolve import parse_window, pipeline_units, resolve, virtual_stages
from megalite.config.schema import CheckpointConfig, LayoutConfig, LoggingConfig, RunConfig
from megalite.config.schema_finetune import FinetuneConfig
from megalite.training.prepare import run_problems
from megalite.verify.samples import write_samples

_WHERE_NOT_HOW = ("device", "threads_per_rank", "distributed_backend", "distributed_timeout_minutes")
_VIRTUAL = ("prefix", "prompt")
_SMALL_VOCABULARY = 130
_RECOMPUTE = ("activations", "granularity", "method", "num_layers", "modules")


def for_proof(config: RunConfig, steps: int) -> RunConfig:
    """The same computation in float64 on CPUs, one thread a rank, from the same weights; it resumes and writes
    nothing."""
    config = copy.deepcopy(config)
    config.precision = replace(config.precision, bf16=False, fp16=False, fp64=True, grad_reduce_in_bf16=False)
    config.layout.device, config.layout.threads_per_rank, config.layout.distributed_backend = "cpu", 1, None
    config.checkpoint, config.logging = _starting_weights(config.checkpoint), LoggingConfig()
    config.peft.save_adapter = config.peft.save_best_adapter = config.finetune.eval_prompt = None
    config.data.num_workers = 0
    config.validation.eval_iters = 0
    config.finetune.train_epochs = None
    if config.training.train_samples is None:
        config.training.train_iters = max(steps, config.training.train_iters or 0)
    config.training.dump_grads = None
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
    """Without any layout, schedule or recompute: the truth."""
    config = copy.deepcopy(config)
    kept = {name: getattr(config.layout, name) for name in _WHERE_NOT_HOW}
    config.layout = LayoutConfig(**kept)
    for name in _RECOMPUTE:
        field = next(f for f in fields(config.training) if f.name == f"recompute_{name}")
        setattr(config.training, field.name, field.default)
    return config


def shrink(config: RunConfig, data_parallel_size: int, folder: Path | None = None) -> RunConfig:
    """A network and batch of seconds in place of the given, with the same structure: layout, kinds of layer, ratio of
    heads to groups, positions, biases, dropout, kind of adapter and its targets. Random weights; data from a rule,
    that of fine-tuning in `folder`. `config`: resolved."""
    config = copy.deepcopy(config)
    model, layout, training = config.model, config.layout, config.training
    tp, pp, chunks = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, virtual_stages(config)
    assert model.num_attention_heads and model.num_layers is not None
    share = model.num_attention_heads // model.num_query_groups
    groups = min(model.num_query_groups, max(tp, 2))
    if tp > model.num_query_groups:
        share = max(min(share, 4), tp // groups)
    else:
        share = min(share, 4)
    heads = groups * share
    model.num_attention_heads, model.num_query_groups = heads, groups
    model.hidden_size, model.kv_channels = 8 * heads, 8
    model.ffn_hidden_size = 3 * 8 * heads
    if layout.decoder_first_pipeline_num_layers is None and layout.decoder_last_pipeline_num_layers is None:
        counted = pipeline_units(config) - model.num_layers
        model.num_layers = 2 * pp * chunks - counted
        layout.num_layers_per_virtual_pipeline_stage = None
        layout.num_virtual_stages_per_pipeline_rank = chunks if chunks > 1 else None
    elif model.num_layers > 48:
        raise FlagError("--shrink keeps uneven stages as they are: give fewer --num-layers")
    _small_batch(config, 16 * tp * layout.context_parallel_size, folder)
    training.micro_batch_size = min(training.micro_batch_size or 1, 2)
    training.global_batch_size = training.micro_batch_size * data_parallel_size * 2 * pp
    return config


def _small_batch(config: RunConfig, length: int, folder: Path | None) -> None:
    """Sequences of `length` tokens from a rule, and a constant batch size."""
    config.tokenizer = replace(
        config.tokenizer, tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=_SMALL_VOCABULARY
    )
    _small_finetuning(config, length, folder)
    is_mock = config.finetune.sft_data is None
    config.data = replace(
        config.data, mock_data=is_mock, data_path=None, train_data_path=None, valid_data_path=None, test_data_path=None,
        data_args_path=None, seq_length=length,
    )  # fmt: skip
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
            f"--load-adapter {peft.load_adapter} doesn't fit a small network: name its kind (--peft) and what it is "
            "beside (--lora-target-modules) instead"
        )
    config.checkpoint, config.finetune = CheckpointConfig(), FinetuneConfig(task=given.task)
    if given.sft_data is not None:
        assert folder is not None
        path = write_samples(folder, given.task or "sft", length=length, vocab_size=_SMALL_VOCABULARY)
        config.finetune.sft_data, config.finetune.sft_packing = [path], given.sft_packing
    if peft.peft in _VIRTUAL:  # with sequence parallelism a prompt is cut over up to so many ranks
        peft.num_virtual_tokens = 4 * config.layout.tensor_model_parallel_size
    if peft.prompt_init_text is not None:
        peft.prompt_init_text = "3 1 4"


def for_matrix(config: RunConfig, folder: Path | None = None) -> RunConfig:
    """A small network of the given kinds of layer that every layout of up to TP 4 x PP 4 x VPP 2 x DP 2 can run.

    Grouped queries get two groups, fewer than TP 4, so that keys and values are copied there. `folder`: as in `shrink`.
    """
    config = copy.deepcopy(config)
    model = config.model
    config.layout = LayoutConfig(**{name: getattr(config.layout, name) for name in _WHERE_NOT_HOW})
    model.num_layers, model.num_attention_heads, model.hidden_size = 8, 4, 32
    model.num_query_groups = 2 if model.group_query_attention else 1
    model.ffn_hidden_size, model.kv_channels = 96, 8
    _small_batch(config, 16, folder)
    config.training.micro_batch_size, config.training.global_batch_size = 1, 8
    return config


def resolved(config: RunConfig, world_size: int) -> RunConfig:
    """Checked and with all derived values; a FlagError says what is wrong."""
    problems = check(config, world_size) + not_built(config)
    if problems:
        raise FlagError("\n".join(problems))
    result = resolve(config, world_size)
    problems = run_problems(result, world_size)
    if problems:
        raise FlagError("\n".join(problems))
    return result
