"""Pretraining: from flags to a finished run.

Key idea: each object is made once, here, from the configuration and those made before it, and handed to what needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.checkpoint import read_config as read_checkpoint_config
from megalite.checkpoint.checkpoint import save_checkpoint
from megalite.checkpoint.storage import Retention
from megalite.config.entry import read_config
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import CheckpointConfig, RunConfig
from megalite.data import check as data_check
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets, build_datasets
from megalite.data.loader import MicrobatchIterator, microbatch_iterator
from megalite.data.microbatch import Microbatch
from megalite.data.splits import split_sizes
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.distributed.collectives import barrier
from megalite.distributed.launch import Environment, choose_device, set_threads, start
from megalite.distributed.mesh import Mesh
from megalite.estimate.model import training_flops_per_token
from megalite.models.gpt import GPTStage
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.module import Build, initialize, named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.pipeline.runtime import PipelineRuntime
from megalite.precision.loss_scaler import LossScaler
from megalite.precision.policy import Precision
from megalite.training import resume
from megalite.training.evaluate import Evaluator
from megalite.training.executor import GPTExecutor
from megalite.training.loop import Loop
from megalite.training.metrics import make_sinks
from megalite.training.profiling import Profiler, Timeline
from megalite.training.report import opening_block
from megalite.training.signals import StopRequests
from megalite.training.state import TrainingState
from megalite.training.timers import Timers
from megalite.training.trainer import Trainer


@dataclass(frozen=True)
class Prepared:
    """All that is decided before any process group exists. `notes`: for the user, once."""

    config: RunConfig
    notes: list[str]
    environment: Environment
    device: torch.device
    threads: int
    backend: AttentionBackend
    tokenizer: Tokenizer
    eod: int


def prepare(argv: Sequence[str], environment: Environment, *, program: str, description: str) -> Prepared:
    """Flags to a checked configuration; every mistake that can be known here is a FlagError."""
    config, notes = read_config(
        argv,
        program=program,
        description=description,
        world_size=environment.world_size,
        checkpoint_config_loader=_checkpoint_config,
    )
    try:
        device = choose_device(config.layout.device, environment.local_rank)
        backend = choose_backend(config, device.type)
        problems = data_check.check(config)
        if problems:
            raise FlagError("\n".join(problems))
        tokenizer = build_tokenizer(config.tokenizer)
        eod = tokenizer.eod
        if eod is None:
            raise FlagError(
                f"--tokenizer-type {config.tokenizer.tokenizer_type}: the tokenizer has no end of document token"
            )
    except ValueError as error:
        raise FlagError(str(error)) from error
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    threads = set_threads(config.layout.threads_per_rank, environment.local_world_size)
    return Prepared(config, notes, environment, device, threads, backend, tokenizer, eod)


def _checkpoint_config(config: CheckpointConfig) -> dict[str, Any] | None:
    """The configuration in the checkpoint that the run would start from, for `--use-checkpoint-args`."""
    found, _ = resume.locate(config)
    return None if found is None else read_checkpoint_config(found).to_dict()


def pretrain(argv: Sequence[str], environment: Environment, *, program: str, description: str) -> None:
    """The whole run of one process."""
    prepared = prepare(argv, environment, program=program, description=description)
    with start(prepared.config.layout, environment, prepared.device) as mesh:
        run = _Run(prepared, mesh)
        run.loop().run()
        run.close()


class _Run:
    """Builds the parts of a run in order."""

    def __init__(self, prepared: Prepared, mesh: Mesh):
        self.prepared, self.config, self.mesh = prepared, prepared.config, mesh
        config = self.config
        self._iterators: list[MicrobatchIterator] = []
        self.say_all(prepared.notes)
        self.precision = Precision.from_config(config.precision)
        self.batches = BatchSchedule.from_config(config)
        self.schedule = Schedule.from_config(config, self.batches)
        if config.training.train_samples is not None:
            self.total_iterations = self.batches.iterations_for(config.training.train_samples)
        else:
            assert config.training.train_iters is not None
            self.total_iterations = config.training.train_iters
        self.datasets = self._datasets()
        self.stage = self._model()
        self.optimizer = Optimizer(named_specs(self.stage), mesh, self.precision, config.optimizer)
        self.scaler = LossScaler.from_config(config.precision)
        self.state = self._starting_state()

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.mesh.is_first:
            print(text, flush=True)

    def say_all(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def _datasets(self) -> Datasets:
        """Each machine's first rank builds the indices, then the others find them in the cache."""
        config, prepared = self.config, self.prepared
        assert config.training.global_batch_size is not None
        sizes = split_sizes(
            config,
            train_samples=self.batches.samples_after(self.total_iterations),
            train_iters=self.total_iterations,
            global_batch_size=config.training.global_batch_size,
        )
        first = prepared.environment.local_rank == 0
        if not first:
            barrier(self.mesh.world)
        datasets = build_datasets(config, prepared.eod, prepared.tokenizer.vocab_size, sizes)
        if first:
            barrier(self.mesh.world)
        self.say_all(datasets.notes)
        return datasets

    def _model(self) -> GPTStage:
        model = self.config.model
        assert model.num_layers is not None
        build = Build(model, self.mesh, self.precision)
        stage = GPTStage(
            build, self.prepared.tokenizer.vocab_size, whole_model(model.num_layers), self.prepared.backend
        )
        initialize(stage, self.config.training.seed)
        return stage

    def _starting_state(self) -> TrainingState:
        config = self.config
        found, weights_only = resume.locate(config.checkpoint)
        if found is None:
            if config.checkpoint.load is not None:
                self.say(f"--load {config.checkpoint.load} holds no checkpoint: starting fresh")
            return TrainingState(dropout_seed=config.training.seed)
        if found.note:
            self.say(found.note)
        state, self.schedule, notes = resume.load(
            found,
            config=config,
            mesh=self.mesh,
            stage=self.stage,
            optimizer=self.optimizer,
            scaler=self.scaler,
            schedule=self.schedule,
            weights_only=weights_only,
        )
        self.say(f"loaded {found.path}" + (" (weights alone)" if weights_only else f", iteration {state.iteration}"))
        self.say_all(notes)
        return state

    def _microbatches(self, dataset: SampleSource, *, start: int, total: int | None = None) -> MicrobatchIterator:
        training, data = self.config.training, self.config.data
        assert training.micro_batch_size is not None
        iterator = microbatch_iterator(
            dataset,
            start_sample=start,
            micro_batch_size=training.micro_batch_size,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            num_workers=data.num_workers,
            seed=training.seed,
            dataloader_type=data.dataloader_type or "single",
            total=total,
            pin_memory=self.mesh.device.type == "cuda",
        )
        self._iterators.append(iterator)
        return iterator

    def close(self) -> None:
        """End the data-loader workers."""
        for iterator in self._iterators:
            iterator.close()

    def _save(self) -> None:
        config = self.config.checkpoint
        if config.save is None:
            return
        path = save_checkpoint(
            Path(config.save),
            self.state.iteration,
            mesh=self.mesh,
            tensors=resume.entries(self.stage, self.optimizer if config.save_optim else None),
            config=self.config,
            training_state=resume.training_state(self.config, self.state, self.optimizer, self.scaler, self.schedule),
            retain=Retention.from_config(config),
        )
        self.say(f"saved {path}")

    def loop(self) -> Loop:
        """The finished assembly."""
        config, mesh, state = self.config, self.mesh, self.state
        executor = GPTExecutor(self.stage, mesh.device, label_smoothing=config.model.label_smoothing)
        recorder = Timeline(config.logging.timeline, mesh.rank) if config.logging.timeline is not None else None
        wait = torch.cuda.synchronize if mesh.device.type == "cuda" else None
        timers = Timers(config.logging.timing_log_level, mesh.device)
        assert config.data.seq_length is not None
        empty: Iterator[Microbatch] = iter(())
        trainer = Trainer(
            config=config,
            mesh=mesh,
            executor=executor,
            runtime=PipelineRuntime(executor, recorder, wait),
            optimizer=self.optimizer,
            scaler=self.scaler,
            batches=self.batches,
            schedule=self.schedule,
            state=state,
            microbatches=self._microbatches(self.datasets.train, start=state.consumed_samples)
            if self.datasets.train is not None
            else empty,
            timers=timers,
            flops_per_token=training_flops_per_token(config.model, self.stage.vocab_size, config.data.seq_length),
            dump_grads=config.training.dump_grads,
        )
        self.say(
            opening_block(
                config,
                mesh=mesh,
                threads=self.prepared.threads,
                stage=self.stage,
                backend=self.prepared.backend,
                precision=self.precision,
                optimizer=self.optimizer,
                datasets=self.datasets,
                state=state,
                total_iterations=self.total_iterations,
            )
        )
        valid, test = self.datasets.valid, self.datasets.test
        return Loop(
            config=config,
            trainer=trainer,
            evaluator=Evaluator(config, mesh, executor, PipelineRuntime(executor), self._whole),
            total_iterations=self.total_iterations,
            valid=None if valid is None else self._microbatches(valid, start=state.consumed_valid_samples),
            test=None if test is None else self._microbatches(test, start=0),
            sinks=make_sinks(config, self.total_iterations, state.iteration) if mesh.is_first else [],
            stops=StopRequests(config.training, mesh),
            profiler=Profiler(config.logging, Path(config.logging.tensorboard_dir or "profile"), mesh.rank),
            save=self._save,
            say=self.say,
        )

    def _whole(self, split: str) -> Iterator[Microbatch]:
        """A whole split once, for `--full-validation`."""
        dataset = self.datasets.valid if split == "valid" else self.datasets.test
        if dataset is None:
            raise UserError(f"--full-validation: there is no {split} data")
        return self._microbatches(dataset, start=0, total=len(dataset))
