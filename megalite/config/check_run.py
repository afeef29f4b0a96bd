"""Combinations of flags that can't work: batches, the loop, the optimizer, learning rate, data, tokenizer, checkpoints,
reporting."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.batches import batch_size_stages
from megalite.config.blends import parse_blend
from megalite.config.errors import UserError
from megalite.config.fields import given, needs
from megalite.config.resolve import DEFAULT_TOKENIZER, data_parallel_size, parse_split
from megalite.config.schema import TOKENIZER_NEEDS, RunConfig, TokenizerConfig

MOST_GROWTHS = 1 << 16  # of --rampup-batch-size: each becomes an entry of a list
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")
STATE_DTYPES = tuple(f"precision.{kind}_dtype" for kind in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"))


def batch_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Batch sizes that don't divide over the data-parallel ranks, and schedules of them."""
    training, replicas = config.training, data_parallel_size(config.layout, world_size)
    if training.micro_batch_size is None or replicas == 0:
        return
    per_step = training.micro_batch_size * replicas
    whole = f"--micro-batch-size {training.micro_batch_size} x {replicas} data-parallel ranks = {per_step}"
    size = training.global_batch_size
    if training.step_batch_size_schedule:
        yield from _step_problems(config, per_step, whole)
    elif size is not None and size % per_step:
        yield f"--global-batch-size {size} is not a multiple of {whole}"
    elif training.rampup_batch_size is not None:
        yield from _rampup_problems(training.rampup_batch_size, size or per_step, per_step, whole)


def _rampup_problems(rampup: list[int], last: int, per_step: int, whole: str) -> Iterator[str]:
    flag = f"--rampup-batch-size {' '.join(str(number) for number in rampup)}"
    if len(rampup) != 3:
        yield f"{flag}: three numbers are needed, START INCREMENT SAMPLES"
        return
    start, increment, samples = rampup
    if start < 1 or increment < 1 or samples < 0:
        yield f"{flag}: START and INCREMENT must be at least 1, SAMPLES not negative"
        return
    if (last - start) // increment > MOST_GROWTHS:
        yield f"{flag}: the batch would grow {(last - start) // increment} times; at most {MOST_GROWTHS} are possible"
    elif start > last:
        yield f"{flag}: START is above --global-batch-size {last}"
    elif (last - start) % increment:
        yield f"{flag}: INCREMENT does not divide --global-batch-size {last} - START = {last - start}"
    for name, number in (("START", start), ("INCREMENT", increment)):
        if number % per_step:
            yield f"{flag}: {name} is not a multiple of {whole}"


def _step_problems(config: RunConfig, per_step: int, whole: str) -> Iterator[str]:
    training = config.training
    try:
        stages = batch_size_stages(training, config.data.seq_length)
    except ValueError as error:
        yield f"--step-batch-size-schedule: {error}"
        return
    for _, size in stages:
        if size < 1 or size % per_step:
            yield f"--step-batch-size-schedule: {size} is not a multiple of {whole}"
    last = stages[-1][1]
    if training.global_batch_size not in (None, last):
        yield f"--global-batch-size {training.global_batch_size} is not the last of --step-batch-size-schedule, {last}"
    if training.rampup_batch_size:
        yield "--step-batch-size-schedule and --rampup-batch-size exclude each other"


def training_problems(config: RunConfig) -> Iterator[str]:
    """Length of training, recomputation, weight decay."""
    training, optimizer = config.training, config.optimizer
    lengths = (training.train_iters, training.train_samples, config.finetune.train_epochs)
    if lengths == (None, None, None) and not config.validation.skip_train:
        yield "--train-iters or --train-samples is missing"
    yield from _recompute_problems(config)
    yield from _rollback_problems(config)
    timeout, minutes = training.step_timeout, config.layout.distributed_timeout_minutes
    if timeout is not None and timeout >= minutes * 60:
        yield (
            f"--step-timeout {timeout} must be below --distributed-timeout-minutes {minutes}, in seconds "
            f"{minutes * 60:g}: or else the collectives that wait for a hung rank fail first"
        )
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        for name, value in (("start", start), ("end", end)):
            if value not in (None, optimizer.weight_decay):
                yield f"--{name}-weight-decay {value} needs --weight-decay-incr-style linear or cosine"
    elif start is None or end is None:
        style = optimizer.weight_decay_incr_style
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    elif end < start:
        yield f"--end-weight-decay {end} is below --start-weight-decay {start}"


def _rollback_problems(config: RunConfig) -> Iterator[str]:
    """Going back takes whole checkpoints of this run."""
    checkpoint, rollback = config.checkpoint, "training.rollback_on_spike"
    companions = ("spike_threshold", "spike_window", "max_rollbacks_in_a_row")
    wanted = config.training.rollback_on_spike
    yield from needs(config, wanted, "--rollback-on-spike", *(f"training.{name}" for name in companions))
    saves = checkpoint.save is not None and checkpoint.save_interval is not None
    yield from needs(config, saves, "--save and --save-interval", rollback)
    for option, on in (("--no-save-optim", checkpoint.save_optim), ("--no-load-optim", checkpoint.load_optim)):
        if wanted and not on:
            yield f"--rollback-on-spike can't be used with {option}: it goes back to the optimizer's state too"


def optimizer_problems(config: RunConfig) -> Iterator[str]:
    """Formats of the optimizer's states."""
    precision, optimizer = config.precision, config.optimizer
    aware = "--use-precision-aware-optimizer"
    yield from needs(config, precision.use_precision_aware_optimizer, aware, *STATE_DTYPES)
    half = precision.bf16 or precision.fp64
    yield from needs(config, precision.bf16, "--bf16", "precision.main_grads_dtype")
    if precision.main_params_dtype == "bf16":
        yield from needs(config, half, "--bf16", "precision.main_params_dtype")
    else:
        yield from needs(config, half or precision.fp16, "--bf16 or --fp16", "precision.main_params_dtype")
    if precision.use_precision_aware_optimizer and optimizer.optimizer != "adam":
        yield f"{aware} needs --optimizer adam, not {optimizer.optimizer}"
    if precision.fp8_param_gather:
        for shown in given(config, "precision.main_params_dtype"):
            yield f"{shown} can't be used with --fp8-param-gather, whose weights need fp32 main parameters"
    if optimizer.adam_backend != "torch":
        for shown in given(config, *STATE_DTYPES):
            yield f"{shown} can't be used with --adam-backend {optimizer.adam_backend}: use torch, the default"


def _recompute_problems(config: RunConfig) -> Iterator[str]:
    training = config.training
    granularity, method = training.recompute_granularity, training.recompute_method
    if training.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, not full"
    if granularity == "full" and (method is None or training.recompute_num_layers is None):
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
    if granularity != "full":
        paths = ("training.recompute_method", "training.recompute_num_layers")
        yield from needs(config, False, "--recompute-granularity full", *paths)
    if granularity == "full" and config.layout.pipeline_schedule == "zb-h1":
        yield (
            "--recompute-granularity full saves nothing with --pipeline-schedule zb-h1, whose waiting weight gradients "
            "keep what each layer computed: use --pipeline-schedule 1f1b, interleaved or gpipe, or "
            "--recompute-granularity selective"
        )
    selective = granularity == "selective" or training.recompute_activations
    yield from needs(config, selective, "--recompute-granularity selective", "training.recompute_modules")
    for module in training.recompute_modules or []:
        if module not in RECOMPUTE_MODULES:
            yield f"--recompute-modules {module}: valid are {', '.join(RECOMPUTE_MODULES)}"


def learning_rate_problems(config: RunConfig) -> Iterator[str]:
    """The learning rate's schedule: its unit, its length, its order of sizes."""
    rate, training = config.learning_rate, config.training
    yield from _unit_problems(config)
    if rate.lr is not None:
        for flag, value in (("--min-lr", rate.min_lr), ("--lr-warmup-init", rate.lr_warmup_init)):
            if value > rate.lr:
                yield f"{flag} {value} is above --lr {rate.lr}"
    yield from needs(config, rate.decoupled_lr is not None, "--decoupled-lr", "learning_rate.decoupled_min_lr")
    if rate.decoupled_lr is not None and (rate.decoupled_min_lr or 0) > rate.decoupled_lr:
        yield f"--decoupled-min-lr {rate.decoupled_min_lr} is above --decoupled-lr {rate.decoupled_lr}"
    if rate.override_opt_param_scheduler and rate.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
    for unit, warmup, decay, wsd in (
        ("iters", rate.lr_warmup_iters, rate.lr_decay_iters or training.train_iters, rate.lr_wsd_decay_iters),
        ("samples", rate.lr_warmup_samples, rate.lr_decay_samples or training.train_samples, rate.lr_wsd_decay_samples),
    ):
        if decay is not None and warmup >= decay:
            yield f"--lr-warmup-{unit} {warmup} must be below --lr-decay-{unit} (default --train-{unit}) {decay}"
        if wsd is not None and decay is not None and wsd > decay:
            yield f"--lr-wsd-decay-{unit} {wsd} is above --lr-decay-{unit} (default --train-{unit}) {decay}"


def _unit_problems(config: RunConfig) -> Iterator[str]:
    """Iterations or samples, never both."""
    rate, training = config.learning_rate, config.training
    by_samples = training.train_samples is not None
    by_iters = training.train_iters is not None or config.finetune.train_epochs is not None
    if training.train_iters is not None and by_samples:
        yield "--train-iters and --train-samples exclude each other"
        return
    unit, other = ("iters", "samples") if by_iters else ("samples", "iters")
    if by_iters or by_samples:
        for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
            yield from needs(config, False, f"--train-{other}, but --train-{unit} was given", f"learning_rate.{name}")
    for warmup in ("lr_warmup_iters", "lr_warmup_samples"):
        if rate.lr_warmup_fraction is not None and getattr(rate, warmup):
            yield f"--lr-warmup-fraction and --{warmup.replace('_', '-')} exclude each other"
    wsd = (rate.lr_wsd_decay_iters, rate.lr_wsd_decay_samples)
    if rate.lr_decay_style == "WSD" and wsd == (None, None):
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    if rate.lr_decay_style != "WSD" and wsd != (None, None):
        yield "--lr-wsd-decay-iters and --lr-wsd-decay-samples need --lr-decay-style WSD"


def data_problems(config: RunConfig) -> Iterator[str]:
    """One source of data, and its split."""
    data = config.data
    split_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    sources = {
        "--mock-data": data.mock_data,
        "--data-path": data.data_path is not None,
        "--data-args-path": data.data_args_path is not None,
        "--train-data-path, --valid-data-path, --test-data-path": any(path is not None for path in split_paths),
    }
    chosen = [flag for flag, given in sources.items() if given]
    if not chosen:
        if config.finetune.task in (None, "lm"):
            yield f"no data is given: give one of {'; '.join(sources)} (for finetune.py also --sft-data)"
    elif len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one source of data"
    elif any(split_paths) and data.train_data_path is None and not config.validation.skip_train:
        yield "--train-data-path is missing beside --valid-data-path or --test-data-path"
    if data.split is not None:
        if any(split_paths):
            yield f"--split {data.split} divides --data-path, but here each split has its own path"
        try:
            parse_split(data.split)
        except ValueError as error:
            yield f"--split: {error}"
    for flag, words in zip(
        ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        (data.data_path, *split_paths),
        strict=True,
    ):
        try:
            if words:
                parse_blend(words, flag)
        except UserError as error:
            yield str(error)


def tokenizer_problems(tokenizer: TokenizerConfig) -> Iterator[str]:
    """The files and numbers that a kind of tokenizer needs."""
    kind = tokenizer.tokenizer_type or DEFAULT_TOKENIZER
    if kind not in TOKENIZER_NEEDS:
        yield f"--tokenizer-type {kind} is unknown: it must be one of {', '.join(TOKENIZER_NEEDS)}"
        return
    default = "" if tokenizer.tokenizer_type else " (the default)"
    missing = [f"--{name.replace('_', '-')}" for name in TOKENIZER_NEEDS[kind] if getattr(tokenizer, name) is None]
    if missing:
        yield f"--tokenizer-type {kind}{default} needs {' and '.join(missing)}"


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Saving needs a folder, loading too."""
    checkpoint = config.checkpoint
    saves = ("save_interval", "save_retain_interval", "keep_last_checkpoints", "keep_best")
    yield from needs(config, checkpoint.save is not None, "--save", *(f"checkpoint.{name}" for name in saves))
    saved = (checkpoint.save, config.peft.save_adapter, config.peft.save_best_adapter)
    yield from needs(
        config, saved != (None,) * 3, "--save, --save-adapter or --save-best-adapter", "checkpoint.async_save"
    )
    interval, retain = checkpoint.save_interval, checkpoint.save_retain_interval
    if interval is not None and retain is not None and retain % interval:
        yield f"--save-retain-interval {retain} is not a multiple of --save-interval {interval}"
    evaluated = config.validation.eval_interval
    if checkpoint.keep_best is not None and (interval is None or evaluated is None or interval % evaluated):
        yield f"--keep-best {checkpoint.keep_best} needs --save-interval at a multiple of --eval-interval"
    loads = ("ckpt_step", "exit_on_missing_checkpoint")
    yield from needs(config, checkpoint.load is not None, "--load", *(f"checkpoint.{name}" for name in loads))
    source = checkpoint.load is not None or checkpoint.pretrained_checkpoint is not None
    takes = ("checkpoint.finetune", "checkpoint.use_checkpoint_args")
    yield from needs(config, source, "--load or --pretrained-checkpoint", *takes)


def reporting_problems(config: RunConfig) -> Iterator[str]:
    """Profiling, TensorBoard, Weights & Biases."""
    logging = config.logging
    start, end = logging.profile_step_start, logging.profile_step_end
    if logging.profile and end <= start:
        yield f"--profile-step-end {end} must be above --profile-step-start {start}"
    yield from needs(config, logging.log_straggler, "--log-straggler", "logging.straggler_minmax_count")
    if logging.wandb_project is not None and logging.wandb_exp_name is None:
        yield f"--wandb-project {logging.wandb_project} needs --wandb-exp-name"
    yield from needs(config, logging.wandb_project is not None, "--wandb-project", "logging.wandb_exp_name")
