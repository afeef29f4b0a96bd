"""Everything that is decided before any process group exists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.storage import refuse_other_kind
from megalite.config.batches import batch_size_stages
from megalite.config.entry import Loaders, fill, read_config
from megalite.config.errors import FlagError, UserError, refuse
from megalite.config.schema import CheckpointConfig, ModelConfig, RunConfig
from megalite.data.splits import check_token_files, tokenizer_notes
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import build_tokenizer, require_eod
from megalite.distributed.launch import Environment, choose_device, set_threads
from megalite.distributed.layout import Layout
from megalite.estimate.model import count_parameters
from megalite.files.remote import place
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.attention_kernels import try_kernel
from megalite.nn.pure import compiler_problems
from megalite.optimizer.fused import check_adam_backend
from megalite.optimizer.schedule import BatchSchedule
from megalite.peft.checks import adapter_problems, check_resumed_adapter
from megalite.peft.files import base_note
from megalite.precision.backends import check_fp8_backend
from megalite.training import resume
from megalite.training.base_model import check_base_weights, read_adapter_flags, read_base_model
from megalite.training.evaluation import Prompts
from megalite.training.executor import LoweredSchedules
from megalite.training.metrics import check_sinks
from megalite.training.report import check_memory, memory_by_stage
from megalite.training.task import TASKS, Task

_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_ALGORITHM = "NCCL_ALGO"


def prepare_determinism(device: torch.device) -> None:
    """Set what cuBLAS and NCCL read when they start. A value of the user's that allows other sums is a FlagError."""
    if device.type != "cuda":
        return
    if os.environ.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
        raise FlagError(
            f"--deterministic-mode: the environment has {_WORKSPACE}={os.environ[_WORKSPACE]}; unset it, or set one of "
            f"{', '.join(_WORKSPACES)}"
        )
    algorithm = os.environ.setdefault(_ALGORITHM, "Ring")
    if "NVLS" in algorithm and not algorithm.startswith("^"):
        raise FlagError(
            f"--deterministic-mode: the environment has {_ALGORITHM}={algorithm}, and NVLS sums in no fixed "
            "order; unset it, or set Ring or Tree"
        )


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only deterministic kernels within, where that is `wanted`; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


MOST_MICROBATCHES = 1 << 16
"""Of a rank in a step: a schedule lists every one."""
MOST_PARAMETERS = 10**15
"""Of a network: their bytes, with gradients and optimizer states, fit into the numbers that count them."""


@dataclass(frozen=True)
class Prepared:
    """A checked configuration and what follows from it on this machine. `notes`: for the user, once."""

    config: RunConfig
    notes: list[str]
    environment: Environment
    device: torch.device
    threads: int
    backend: AttentionBackend
    tokenizer: Tokenizer
    task: Task
    prompts: Prompts | None

    @property
    def vocab_size(self) -> int:
        """Ids that the model has rows for."""
        return self.config.model.model_vocab_size or self.tokenizer.vocab_size


def prepare(
    argv: Sequence[str],
    environment: Environment,
    *,
    program: str,
    description: str,
    sections: Sequence[str] | None = None,
) -> Prepared:
    """Flags to a checked configuration; every mistake that can be known here is a FlagError. `sections`: see
    `read_config`."""
    config, notes = read_config(
        argv,
        program=program,
        description=description,
        world_size=environment.world_size,
        sections=sections,
        loaders=_loaders(),
    )
    prepared = prepare_config(config, environment, notes)
    refuse(size_problems(prepared.config.model, prepared.vocab_size))
    stages = memory_by_stage(
        prepared.config, prepared.vocab_size, prepared.backend, environment.world_size, prepared.device
    )
    memory = check_memory(stages, prepared.config, environment, prepared.device)
    return replace(prepared, notes=[*prepared.notes, *memory])


def prepare_config(config: RunConfig, environment: Environment, notes: Sequence[str] = ()) -> Prepared:
    """The packages' own checks of a resolved configuration. Mistakes are a FlagError."""
    if config.peft.load_adapter is not None and config.peft.peft == "none":
        raise FlagError(f"--load-adapter {config.peft.load_adapter}: give the kind of adapter with --peft")
    try:
        device = choose_device(config.layout.device, environment)
        if config.training.deterministic_mode:
            prepare_determinism(device)
        backend = choose_backend(config, device.type)
        with deterministic(config.training.deterministic_mode):
            try_kernel(config, backend, device)
        problems = [*check_token_files(config), *check_sinks(config), *check_adam_backend(config, device.type)]
        problems += check_fp8_backend(config.precision, device)
        problems += compiler_problems(config.training.compile, device.type)
        refuse([*problems, *run_problems(config, environment.world_size)])
        for given in filter(None, (config.checkpoint.load, config.checkpoint.pretrained_checkpoint)):
            refuse_other_kind(place(given), "--load")
        tokenizer = build_tokenizer(config.tokenizer)
        task = TASKS[config.finetune.task](config, tokenizer)
        if task.of_tokens:
            require_eod(tokenizer, f"--tokenizer-type {config.tokenizer.tokenizer_type}")
        notes = [*notes, *tokenizer_notes(config, tokenizer)]
        folder, adapted = config.finetune.load_hf, config.peft.peft != "none"
        upcycled = config.model.moe_use_upcycling
        if folder is not None or adapted or upcycled:
            found, weights_only = resume.locate(config.checkpoint)
            if upcycled and folder is None and found is None:
                raise FlagError(
                    f"--moe-use-upcycling: --load {config.checkpoint.load} holds no checkpoint, so the experts have no "
                    "dense model to start from: give it with --pretrained-checkpoint or --load-hf"
                )
            if folder is not None and (adapted or found is None):
                refuse(check_base_weights(folder))
            if adapted and found is not None:
                check_resumed_adapter(found, config, weights_only=weights_only)
        refuse([*vocabulary_problems(config, tokenizer), *task.problems()])
        prompts = task.prompts()
        if config.peft.prompt_init_text is not None and not tokenizer.tokenize(config.peft.prompt_init_text):
            raise FlagError(f"--prompt-init-text {config.peft.prompt_init_text!r} has no tokens: give it some text")
        rows = config.model.model_vocab_size or tokenizer.vocab_size
        refuse(adapter_problems(config, rows, backend, device.type))
    except ValueError as error:
        raise FlagError(str(error)) from error
    threads = set_threads(config.layout.threads_per_rank, environment.local_world_size)
    if config.peft.load_adapter is not None and folder is not None:
        notes = [*notes, *filter(None, [base_note(config.peft.load_adapter, folder)])]
    return Prepared(config, list(notes), environment, device, threads, backend, tokenizer, task, prompts)


def fill_config(config: RunConfig, explicit: Collection[str]) -> list[str]:
    """As `config.entry.fill`, for a program that parses flags of its own: with what reads folders and checkpoints."""
    return fill(config, explicit, _loaders())


def _loaders() -> Loaders:
    return Loaders(_checkpoint_config, read_base_model, read_adapter_flags)


def vocabulary_problems(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """A model may have rows for more ids than the tokenizer has, but not for fewer."""
    rows = config.model.model_vocab_size
    if rows is None or rows >= tokenizer.vocab_size:
        return []
    what = config.tokenizer.tokenizer_model or config.tokenizer.tokenizer_type
    source = f"--load-hf {config.finetune.load_hf}" if config.finetune.load_hf else f"--model-vocab-size {rows}"
    return [
        f"{source}: the model has rows for {rows} ids, but the tokenizer {what} has {tokenizer.vocab_size}: give the "
        "model's own tokenizer, or remove the extra ids from its files"
    ]


def size_problems(model: ModelConfig, vocab_size: int) -> list[str]:
    """A network of which not even shapes can be made. `model`: resolved."""
    count = count_parameters(model, vocab_size).total
    if count <= MOST_PARAMETERS:
        return []
    return [
        f"the network would have {count:.3g} parameters; at most {MOST_PARAMETERS:.0e} are possible: lower "
        "--num-layers, --hidden-size, --ffn-hidden-size, --num-experts, --moe-ffn-hidden-size or --vocab-size"
    ]


def run_problems(config: RunConfig, world_size: int) -> list[str]:
    """What is wrong with the length of a resolved run or with its schedule's microbatches."""
    return _length_problems(config) or _schedule_problems(config, world_size)


def _length_problems(config: RunConfig) -> list[str]:
    by_epochs = config.finetune.train_epochs is not None and config.training.train_iters is None  # the data will tell
    if config.validation.skip_train or by_epochs or BatchSchedule.from_config(config).total_iterations(config) > 0:
        return []
    return [
        f"--train-samples {config.training.train_samples} is less than one step of "
        f"{BatchSchedule.from_config(config).at(0)} samples: raise it"
    ]


def _schedule_problems(config: RunConfig, world_size: int) -> list[str]:
    """What the pipeline schedule can't do with the microbatches of each global batch size of the run."""
    dp, plan, problems = Layout.from_config(config.layout, world_size).dp, LoweredSchedules(config, 0), []
    for _, size in batch_size_stages(config.training, config.data.seq_length):
        microbatches = size // (config.training.micro_batch_size * dp)
        if microbatches > MOST_MICROBATCHES:
            problems.append(
                f"global batch size {size:,} is {microbatches:,} microbatches per data-parallel rank and step; at most "
                f"{MOST_MICROBATCHES:,} are possible"
            )
            continue
        try:
            plan.training(microbatches)
        except UserError as error:
            problems.append(f"global batch size {size} is {microbatches} microbatches per data-parallel rank: {error}")
    return problems


def _checkpoint_config(config: CheckpointConfig) -> dict[str, Any] | None:
    """The configuration in the checkpoint that the run would start from, for `--use-checkpoint-args`."""
    found, _ = resume.locate(config)
    return None if found is None else read_checkpoint_config(found).to_dict()
