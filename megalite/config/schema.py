"""The single description of a run, as plain dataclasses.

The command-line flags are generated from these fields (`flags.py`), a checkpoint stores them as JSON, and every
component is built from them. A field `hidden_size` is the flag `--hidden-size`, as in Megatron-LM; where the flag's
spelling differs the field says so in its metadata. Imports neither torch nor numpy, so that `--help` is instant.

A field whose default is None and whose type isn't optional is one that every run has: it is given or derived by
`resolve`, and a resolved configuration has a value there.
"""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megalite.config.schema_field import ABOVE_ZERO, BELOW_ONE, NOT_NEGATIVE, UP_TO_100, Bound, flag
from megalite.config.schema_finetune import FinetuneConfig, PeftConfig
from megalite.config.schema_model import ROTARY as ROTARY
from megalite.config.schema_model import ModelConfig as ModelConfig
from megalite.config.values import type_problem

TOKENIZER_NEEDS = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
"""The kinds of tokenizers, and the fields of `TokenizerConfig` that each needs, in the order in which it takes them."""


@dataclass
class LayoutConfig:
    """How the work is split over processes."""

    tensor_model_parallel_size: int = flag(1, "ranks that each hold a part of every layer's matrices (TP)")
    pipeline_model_parallel_size: int = flag(1, "stages that each hold a part of the layers (PP)")
    context_parallel_size: int = flag(1, "ranks that each hold a part of every sequence (CP)")
    expert_model_parallel_size: int = flag(1, "ranks that share the experts")
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that each hold a part of every expert's matrices; default: as TP"
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "what context-parallel ranks exchange: keys and values in a ring, or all at once; heads; heads, then keys and "
        "values in a ring; default p2p",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, "with --cp-comm-type a2a+p2p: ranks that exchange heads, and ranks in a ring"
    )
    sequence_parallel: bool = flag(False, "split activations between blocks along the sequence over the TP ranks")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers in one model chunk of the interleaved schedule"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "model chunks of each pipeline rank; default 1")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, "microbatches that one chunk runs before the next chunk starts; default: the pipeline size"
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers on the first stage; default: as many as on the others", bound=NOT_NEGATIVE
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers on the last stage; default: as many as on the others", bound=NOT_NEGATIVE
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as a layer when splitting stages")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the output layer as a layer when splitting stages")
    pipeline_schedule: str = flag(
        "auto",
        "pipeline schedule; auto: interleaved if virtual stages are given, else 1f1b",
        choices=("auto", "gpipe", "1f1b", "interleaved", "zb-h1"),
    )
    distributed_backend: str | None = flag(
        None, "communication library; default nccl on CUDA, gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10, "timeout of one collective operation; then the run fails", bound=ABOVE_ZERO
    )
    use_distributed_optimizer: bool = flag(False, "shard the optimizer's state over data-parallel ranks (ZeRO-1)")
    data_parallel_sharding_strategy: str = flag(
        None,
        "what data-parallel ranks shard; default no_shard, or optim with --use-distributed-optimizer",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward runs")
    overlap_param_gather: bool = flag(False, "gather parameters while the forward (and backward) runs")
    ddp_bucket_size: int | None = flag(
        None,
        "parameters in one bucket of gradients; default: all of a chunk, or with --overlap-grad-reduce the larger of "
        "40 million and 1 million per data-parallel rank",
    )
    device: str = flag("auto", "where to run; auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda"))
    threads_per_rank: int | None = flag(None, "CPU threads of each process; default: cores / processes on this machine")


@dataclass
class OptimizerConfig:
    """The optimizer and regularisation of its update."""

    optimizer: str = flag("adam", "adam (decoupled weight decay, i.e. AdamW) or sgd", choices=("adam", "sgd"))
    weight_decay: float = flag(0.01, "weight decay: decoupled with adam, added to the gradient with sgd")
    start_weight_decay: float | None = flag(None, "weight decay at the first step; default --weight-decay")
    end_weight_decay: float | None = flag(None, "weight decay at the last step; default --weight-decay")
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay goes from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "largest global gradient norm; 0: no clipping")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", bound=BELOW_ONE)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", bound=BELOW_ONE)
    adam_eps: float = flag(1e-8, "added to the denominator of Adam", bound=ABOVE_ZERO)
    sgd_momentum: float = flag(0.9, "momentum of SGD", bound=BELOW_ONE)
    adam_backend: str = flag(
        "torch",
        "library of the fused Adam: PyTorch, or on CUDA NVIDIA Apex or Transformer Engine",
        choices=("torch", "apex", "te"),
    )
    optimizer_cpu_offload: bool = flag(False, "keep main parameters and moments in host memory and update them there")
    optimizer_offload_fraction: float = flag(
        1.0,
        "share of this state kept in host memory",
        bound=Bound("must be from 0 to 1", lambda value: 0 <= value <= 1),
    )


@dataclass
class LearningRateConfig:
    """The learning rate as a function of consumed samples."""

    lr: float = flag(None, "largest learning rate", needed=True)
    min_lr: float = flag(0.0, "smallest learning rate after warm-up")
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "iterations to decay over; default --train-iters")
    lr_decay_samples: int | None = flag(None, "samples to decay over; default --train-samples")
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of the last phase of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of WSD's last phase")
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's last phase")
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up", bound=NOT_NEGATIVE)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", bound=NOT_NEGATIVE)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay's length", bound=BELOW_ONE)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up")
    decoupled_lr: float | None = flag(None, "largest learning rate of the embedding and the output layer; default --lr")
    decoupled_min_lr: float | None = flag(
        None, "smallest learning rate of the embedding and the output layer; default --min-lr"
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, use the command line's schedule, without a message if it differs from the checkpoint's",
        option="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, use the checkpoint's schedule instead of the command line's",
        option="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )


@dataclass
class TrainingConfig:
    """Batches, length and control of the loop."""

    micro_batch_size: int = flag(None, "sequences in one forward of one data-parallel rank", needed=True)
    global_batch_size: int = flag(None, "sequences per step; default micro batch x data-parallel size")
    rampup_batch_size: list[int] | None = flag(
        None,
        "START INCREMENT SAMPLES: the global batch starts at START and grows by INCREMENT, in equal parts of SAMPLES",
        bound=NOT_NEGATIVE,
    )
    step_batch_size_schedule: list[str] | None = flag(
        None, "TOKENS:SIZE ...: after TOKENS tokens the global batch has SIZE sequences; K, M, B, T are powers of 1000"
    )
    train_iters: int | None = flag(None, "steps to train")
    train_samples: int | None = flag(None, "sequences to train on, instead of --train-iters")
    exit_interval: int | None = flag(None, "save and exit when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", bound=ABOVE_ZERO)
    exit_signal_handler: bool = flag(False, "on SIGTERM or SIGINT finish the step, save and exit with status 0")
    step_timeout: float | None = flag(
        None,
        "seconds without a step, a batch of an evaluation or a save after which all ranks write their Python stacks "
        "and the run fails; default: never",
        bound=ABOVE_ZERO,
    )
    seed: int = flag(
        1234,
        "seed of initialisation, data order and dropout",
        bound=Bound("must be from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    )
    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    recompute_granularity: str | None = flag(None, "what to recompute in the backward", choices=("full", "selective"))
    recompute_method: str | None = flag(
        None, "which layers --recompute-granularity full recomputes", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(
        None, "uniform: layers of one recomputed group; block: recomputed layers of each stage"
    )
    recompute_modules: list[str] | None = flag(None, "modules that selective recomputation covers; default core_attn")
    deterministic_mode: bool = flag(False, "only deterministic kernels; CPUs always use them")
    calculate_per_token_loss: bool = flag(
        False, "changes nothing: the loss is always the mean over all tokens of the batch"
    )
    nan_action: str = flag(
        None,
        "what to do if loss or gradient norm isn't finite: stop, or skip the step; default stop, with --fp16 skip",
        choices=("stop", "skip"),
    )
    max_skips_in_a_row: int = flag(50, "stop after this many skipped steps in a row, in any precision")
    rollback_on_spike: bool = flag(
        False,
        "when a loss is far above the last ones, go back to the newest checkpoint and pass over the data read since",
    )
    spike_threshold: float = flag(
        6.0, "standard deviations above the mean of the last losses from which a loss is a spike", bound=ABOVE_ZERO
    )
    spike_window: int = flag(
        100,
        "how many last good steps this mean is of; nothing is a spike before there are so many",
        bound=Bound("must be at least 2", lambda value: value >= 2),
    )
    max_rollbacks_in_a_row: int = flag(3, "stop at a spike after this many rollbacks to the same checkpoint")
    compile: bool = flag(
        False,
        "torch.compile for what lies between matrix products: norms, rotations, activations, loss; needs a compiler",
    )
    dump_grads: str | None = flag(
        None, "folder for every parameter's full gradient at the first step of this run", writes="folder"
    )


@dataclass
class PrecisionConfig:
    """Number formats."""

    bf16: bool = flag(False, "bfloat16 parameters and activations, fp32 main parameters")
    fp16: bool = flag(False, "float16 parameters and activations, fp32 main parameters, loss scaling")
    fp64: bool = flag(False, "everything in float64, for proofs and tests")
    use_precision_aware_optimizer: bool = flag(
        False, "let main gradients, main parameters and moments be held in fewer bits than fp32"
    )
    main_grads_dtype: str = flag("fp32", "format of the main gradients and their sums", choices=("fp32", "bf16"))
    main_params_dtype: str = flag(
        "fp32",
        "format of the main parameters: fp16: scaled; bf16: none beside the parameters, whose updates are rounded at "
        "random, right on average",
        choices=("fp32", "fp16", "bf16"),
    )
    exp_avg_dtype: str = flag(
        "fp32",
        "format of Adam's first moment, rounded at random; fp16 and fp8: scaled",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = flag(
        "fp32",
        "format of Adam's second moment, rounded at random; fp16: scaled; fp8: a logarithm in eight bits",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    loss_scale: float | None = flag(None, "a fixed loss scale for --fp16; default: a dynamic one", bound=ABOVE_ZERO)
    initial_loss_scale: float = flag(4294967296, "first value of the dynamic loss scale", bound=ABOVE_ZERO)
    min_loss_scale: float = flag(1.0, "smallest value of the dynamic loss scale", bound=ABOVE_ZERO)
    loss_scale_window: int = flag(1000, "finite steps in a row before the dynamic loss scale doubles")
    hysteresis: int = flag(2, "overflowing steps before the dynamic loss scale halves")
    grad_reduce_in_bf16: bool = flag(False, "sum gradients over data-parallel ranks in bf16 instead of fp32")
    fp8_format: str | None = flag(None, "FP8 for the matrix products", choices=("e4m3", "hybrid"))
    fp8_recipe: str = flag(
        "delayed",
        "FP8 scales. delayed: of a tensor, from earlier steps; tensorwise: of a tensor; blockwise: of 1 x 128 "
        "elements, of a weight 128 x 128; mxfp8: of 32 elements, powers of two",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
    )
    fp8_margin: int = flag(0, "powers of two of headroom in delayed scaling", bound=UP_TO_100)
    fp8_amax_history_len: int = flag(
        1,
        "steps whose maxima delayed scaling looks at, with --fp8-amax-compute-algo max",
        bound=Bound("must be from 1 to 65536", lambda value: 1 <= value <= 65536),
    )
    fp8_amax_compute_algo: str = flag(
        "most_recent", "which of these maxima delayed scaling takes", choices=("most_recent", "max")
    )
    fp8_param_gather: bool = flag(False, "store and gather the weights of FP8 layers in FP8")
    first_last_layers_bf16: bool = flag(False, "some first and last layers compute without FP8")
    num_layers_at_start_in_bf16: int = flag(1, "first layers of --first-last-layers-bf16", bound=NOT_NEGATIVE)
    num_layers_at_end_in_bf16: int = flag(1, "last layers of --first-last-layers-bf16", bound=NOT_NEGATIVE)
    fp8_backend: str = flag(
        "auto",
        "library for FP8 products: te: Transformer Engine; torch: torch's scaled products; emulated: rounded to FP8, "
        "multiplied in fp32, on any device",
        choices=("auto", "te", "torch", "emulated"),
    )


@dataclass
class DataConfig:
    """Where training text comes from and in which order."""

    data_path: list[str] | None = flag(
        None, "prefix of one .bin/.idx pair, or a blend: WEIGHT PREFIX ...", address=True
    )
    split: str | None = flag(None, "shares of documents for train,valid,test; default 969,30,1")
    train_data_path: list[str] | None = flag(
        None, "prefix or blend for training, instead of --data-path with --split", address=True
    )
    valid_data_path: list[str] | None = flag(None, "prefix or blend for validation", address=True)
    test_data_path: list[str] | None = flag(None, "prefix or blend for testing", address=True)
    data_args_path: str | None = flag(None, "file with the arguments of --data-path")
    data_cache_path: str | None = flag(
        None, "folder for the sample indices, and for data from object storage; default: cache/ beside each dataset"
    )
    mmap_bin_files: bool = flag(True, "read .bin files instead of memory-mapping them", option="--no-mmap-bin-files")
    mock_data: bool = flag(False, "generated documents with a pattern that a model can learn, instead of files")
    seq_length: int = flag(None, "tokens in a sequence", needed=True)
    num_workers: int = flag(2, "data-loader processes per rank", bound=NOT_NEGATIVE)
    dataloader_type: str = flag(
        None,
        "single: read samples in order (default); cyclic: shuffle each pass (default with --sft-data)",
        choices=("single", "cyclic"),
    )
    reset_position_ids: bool = flag(False, "positions restart at 0 after each end of document")
    reset_attention_mask: bool = flag(False, "no attention between tokens of different documents")
    eod_mask_loss: bool = flag(False, "no loss at positions whose input is an end-of-document token")


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    tokenizer_type: str = flag(
        None,
        "kind of tokenizer; default GPT2BPETokenizer",
        choices=tuple(TOKENIZER_NEEDS),
    )
    tokenizer_model: str | None = flag(None, "file (or for HuggingFaceTokenizer the folder) of the tokenizer")
    tiktoken_pattern: str | None = flag(None, "how TikTokenizer splits words", choices=("v1", "v2"))
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer")
    vocab_size: int | None = flag(
        None, "number of ids of NullTokenizer, without its end of document; other tokenizers must have this many ids"
    )
    parse_special_tokens: bool = flag(
        False,
        "read special tokens written in documents and messages (<|endoftext|>) as tokens, not as text; in a prompt "
        "they are always tokens",
    )


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = flag(None, "folder to save checkpoints in, or s3://BUCKET/RUN", writes="model", address=True)
    save_interval: int | None = flag(
        None, "steps between saves; default: only at the end", aliases=("--persistent-save-interval",)
    )
    save_retain_interval: int | None = flag(None, "keep only checkpoints at multiples of this, and the newest")
    keep_last_checkpoints: int | None = flag(None, "keep only this many newest checkpoints")
    keep_best: int | None = flag(
        None,
        "keep the checkpoints with the lowest validation losses, this many; without --keep-last-checkpoints only these "
        "and the newest",
    )
    load: str | None = flag(
        None, "folder to resume from; if it has no checkpoint, training starts from the beginning", address=True
    )
    ckpt_step: int | None = flag(None, "iteration to load instead of the newest")
    finetune: bool = flag(False, "load only the weights and start at iteration 0")
    pretrained_checkpoint: str | None = flag(
        None, "folder to load weights from if --load has no checkpoint", address=True
    )
    save_optim: bool = flag(True, "do not save the optimizer's state", option="--no-save-optim")
    save_rng: bool = flag(True, "do not save the dropout seed", option="--no-save-rng")
    load_optim: bool = flag(True, "do not load the optimizer's state", option="--no-load-optim")
    load_rng: bool = flag(True, "do not load the dropout seed: use --seed", option="--no-load-rng")
    use_checkpoint_args: bool = flag(False, "take network and tokenizer flags that you leave out from the checkpoint")
    exit_on_missing_checkpoint: bool = flag(False, "fail if --load has no checkpoint, instead of starting a new run")
    async_save: bool = flag(False, "copy checkpoints and adapters to memory and write them while training goes on")


@dataclass
class ValidationConfig:
    """Evaluation during and after training."""

    eval_iters: int = flag(100, "global batches per evaluation; 0: no evaluation", bound=NOT_NEGATIVE)
    eval_interval: int | None = flag(None, "steps between evaluations; default: only at the end")
    skip_train: bool = flag(False, "evaluate only")
    full_validation: bool = flag(False, "evaluate on the whole validation and test set each time")


@dataclass
class LoggingConfig:
    """What a run reports."""

    log_interval: int = flag(100, "steps between log lines")
    log_throughput: bool = flag(False, "TFLOP/s per device in the log line")
    log_params_norm: bool = flag(False, "norm of the parameters in the log line")
    log_fp8_stats: bool = flag(
        False, "of every FP8 layer and factor: largest magnitude, scale, shares that become zero and that are cut off"
    )
    log_top_grad_norms: int = flag(
        0, "how many of the largest gradient norms to print, with their parameters' names", bound=NOT_NEGATIVE
    )
    log_straggler: bool = flag(
        False,
        "at each log line the ranks that compute longest and shortest; on CUDA each forward and backward then waits",
    )
    straggler_minmax_count: int = flag(1, "how many ranks --log-straggler names at each end")
    log_memory: bool = flag(False, "print each rank's memory after the first step, measured and predicted")
    log_num_zeros_in_grad: bool = flag(False, "number of zeros in the gradient in the log line")
    timing_log_level: int = flag(0, "detail of timers in the log: 0, 1 or 2", choices=(0, 1, 2))
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard", writes="folder")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points")
    log_memory_to_tensorboard: bool = flag(False, "write memory use to TensorBoard")
    wandb_project: str | None = flag(None, "Weights & Biases project; needs the wandb package")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name")
    profile: bool = flag(False, "write a torch.profiler trace of some steps")
    profile_step_start: int = flag(10, "first profiled step", bound=NOT_NEGATIVE)
    profile_step_end: int = flag(12, "step at which profiling ends (not included)", bound=NOT_NEGATIVE)
    metrics_file: str | None = flag(
        None, "file for one JSON object per step, at full precision", writes="file", address=True
    )
    timeline: str | None = flag(
        None, "folder for one file per rank: a JSON line per pipeline action, with its times", writes="folder"
    )


@dataclass
class RunConfig:
    """A whole run. One section a field; the order is that of `--help`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def microbatches_per_step(self, data_parallel_size: int) -> int:
        """Microbatches of one data-parallel rank in a full global batch, of a resolved configuration."""
        return self.training.global_batch_size // (self.training.micro_batch_size * data_parallel_size)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain JSON-ready dictionaries, one a section."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, dict[str, Any]]) -> RunConfig:
        """The inverse of `to_dict`. Sections or fields that this version doesn't know, and values of another type than
        their field's, raise a ValueError that names the field."""
        config = cls()
        for section, stored in values.items():
            if not hasattr(config, section):
                raise ValueError(f"unknown configuration section {section!r}")
            target = getattr(config, section)
            known = {each.name: each for each in dataclasses.fields(target)}
            for key, value in stored.items():
                if key not in known:
                    raise ValueError(f"unknown configuration field {section}.{key}")
                wanted = type_problem(str(known[key].type), value)
                if wanted is not None and not value is known[key].default is None:
                    raise ValueError(f"{section}.{key} is {value!r}, not {wanted}")
                setattr(target, key, value)
        return config
