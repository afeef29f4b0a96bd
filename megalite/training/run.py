"""All parts of a run, built in order.

Key idea: each object is made once, here, from the configuration and those made before it, and handed to what needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from megalite.checkpoint.checkpoint import save_checkpoint
from megalite.checkpoint.errors import on_first_rank
from megalite.checkpoint.huggingface.hub import published_name
from megalite.checkpoint.huggingface.travel import companions
from megalite.checkpoint.storage import CheckpointDirectory, Retention
from megalite.config.errors import UserError
from megalite.config.fields import output_folders
from megalite.data.gpt_dataset import Datasets
from megalite.data.splits import data_digests
from megalite.distributed.collectives import broadcast_object
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, whole
from megalite.distributed.turns import first_of_machine_first
from megalite.estimate.model import AdapterWork, training_flops_per_token
from megalite.models.gpt import GPTStage, units_of
from megalite.models.stages import stage_spans
from megalite.nn.module import Build, initialize_pieces, specs_of
from megalite.nn.recompute import Recompute
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.optimizer.sharding import Sharding
from megalite.optimizer.transport import Transport
from megalite.peft.adapter import AdapterPlan, plan_adapter, save_adapter
from megalite.pipeline.runtime import PipelineRuntime, Recorder
from megalite.pipeline.transport import ProcessGroupTransport
from megalite.precision.loss_scaler import LossScaler
from megalite.precision.policy import Precision
from megalite.training import resume
from megalite.training.base_model import base_names, load_base_model
from megalite.training.diagnostics import Profiler, Timeline, Timers, dump_gradients
from megalite.training.evaluation import Continuations, Evaluator
from megalite.training.executor import GPTExecutor, Plan
from megalite.training.loop import Loop
from megalite.training.memory import PeakMemory, memory_report, peak_process_memory
from megalite.training.metrics import StepRecord, make_sinks
from megalite.training.prepare import Prepared
from megalite.training.report import opening_block, predicted_memory
from megalite.training.resume import TrainingState
from megalite.training.signals import StopRequests
from megalite.training.task import Feed
from megalite.training.trainer import Trainer


class Run:
    """One process's part of a run. `trainer` steps; `loop()` runs to the end; `close()` ends the data workers."""

    def __init__(self, prepared: Prepared, mesh: Mesh, *, transport: Transport | None = None):
        """Build model, optimizer and data, and load what `--load` names. Collective over the world.

        `transport`: for the optimizer's data-parallel collectives, in place of the mesh's own.
        """
        self.prepared, self.config, self.task, self.mesh = prepared, prepared.config, prepared.task, mesh
        config = self.config
        self.say(*prepared.notes)
        self.precision = Precision.from_config(config.precision)
        self.datasets = self._datasets()  # first, since it may say how many steps there are
        self.companions = self._companions()
        self.batches = BatchSchedule.from_config(config)
        self.schedule = Schedule.from_config(config, self.batches)
        self.total_iterations = self.batches.total_iterations(config)
        self.data_digests = data_digests(config) if mesh.is_first else {}
        self.base_names: set[str] = set()  # parameters whose values come from the folder of --load-hf
        sharding = Sharding.from_config(config.layout, config.optimizer, mesh.dp_cp.size)
        # Sharded parameters get values from their shards; frozen ones are not sharded.
        without_values = sharding.parameters and config.peft.peft == "none"
        self.stages = self._model(without_values=without_values)
        self.adapter, self._adapter_saved = self._put_adapter(), -1
        self.optimizer = Optimizer(units_of(self.stages), mesh, self.precision, config.optimizer, sharding, transport)
        if without_values:
            self._initialize(self.optimizer.parameter_pieces().values())
            self.optimizer.parameters_loaded(with_state=False)
        self.scaler = LossScaler.from_config(config.precision)
        self.state = self._starting_state()
        self.feed = Feed(self.task, mesh, self.datasets, self.state)
        self.decisions = self.task.decisions(mesh)
        self.executor = GPTExecutor(self.stages, mesh, self.task.objective(), optimizer=self.optimizer)
        self.executor.on_evaluated = None if self.decisions is None else self.decisions.add
        self.plan = Plan(config, mesh.pp.rank)
        self.transport = None
        if mesh.pp.size > 1:
            timeout = timedelta(minutes=config.layout.distributed_timeout_minutes)
            self.transport = ProcessGroupTransport(mesh.pp, len(self.stages), mesh.device, timeout=timeout)
        self.trainer = self._trainer()

    def say(self, *lines: str) -> None:
        """Print on the first rank."""
        if self.mesh.is_first:
            for line in lines:
                print(line, flush=True)

    def _datasets(self) -> Datasets:
        """Each machine's first rank builds the indices, then the others find them in the cache."""
        config, prepared = self.config, self.prepared
        datasets = first_of_machine_first(self.task.datasets, self.mesh, first=prepared.environment.local_rank == 0)
        self.say(*datasets.notes)
        for flag, value in (
            ("--save-best-adapter", config.peft.save_best_adapter),
            ("--eval-prompt", config.finetune.eval_prompt),
        ):
            if value is not None and datasets.valid is None:
                raise UserError(f"{flag} needs a validation set, and the data flags give none")
        return datasets

    def _companions(self) -> dict[str, bytes]:
        """On the first rank the small files to write beside weights, read now: at the end they may be gone."""
        files: dict[str, bytes] = {}
        if output_folders(self.config):
            read = partial(companions, self.config, conversations=self.datasets.conversations)
            on_first_rank(lambda: files.update(read()), self.mesh.world)
        return files

    def _model(self, *, without_values: bool) -> list[GPTStage]:
        """This rank's chunks of the model, initialised if they have values."""
        config = self.config
        recompute = Recompute.from_config(config.training)
        vocab_size, backend = self.prepared.vocab_size, self.prepared.backend
        stages = []
        for span in stage_spans(config)[self.mesh.pp.rank]:
            build = Build(config.model, self.mesh, self.precision, recompute=recompute, without_values=without_values)
            stages.append(GPTStage(build, vocab_size, span, backend, self._outputs()))
        if config.finetune.load_hf is not None:
            self.base_names = base_names(config.finetune.load_hf, (name for name, _, _ in specs_of(stages)))
        if not without_values:
            self._initialize(whole(*named) for named in specs_of(stages))
        return stages

    def _put_adapter(self) -> AdapterPlan | None:
        """Put what `--peft` asks for on the built model; what then requires a gradient is what the optimizer trains."""
        config = self.config
        if config.peft.peft == "none":
            return None
        rows, classes = self.prepared.vocab_size, self._outputs()
        plan = plan_adapter(config.peft, config.model, rows, self.mesh.world, classes)
        plan.apply(self.stages, mesh=self.mesh, precision=self.precision, seed=config.training.seed)
        return plan

    def _outputs(self) -> int | None:
        """Classes of a classifier."""
        return None if self.task.classes is None else len(self.task.classes)

    def _adapter_work(self) -> AdapterWork | None:
        return (
            None if self.adapter is None else self.adapter.work(self.config.model, head=self.task.classes is not None)
        )

    def _initialize(self, pieces: Iterable[Piece]) -> None:
        """Fill what is held of the parameters, with zeros where values are loaded later."""
        pieces = list(pieces)
        for piece in pieces:
            piece.flat.zero_()
        initialize_pieces((p for p in pieces if p.name not in self.base_names), self.config.training.seed)

    def _starting_state(self) -> TrainingState:
        config = self.config
        found, weights_only = resume.locate_together(config.checkpoint, self.mesh)
        if self.adapter is not None:
            self._fill_adapter(self.adapter, found if weights_only else None)
            found = None if weights_only else found
        elif found is None:
            self._load_base()
        if found is None:
            if config.checkpoint.load is not None and not weights_only:
                self.say(f"--load {config.checkpoint.load} holds no checkpoint: starting a new run")
            return TrainingState(dropout_seed=config.training.seed)
        if found.note:
            self.say(found.note)
        state, self.schedule, notes = resume.load(
            found,
            config=config,
            mesh=self.mesh,
            stages=self.stages,
            optimizer=self.optimizer,
            scaler=self.scaler,
            schedule=self.schedule,
            weights_only=weights_only,
            data=self.data_digests,
        )
        what = " (only weights)" if weights_only else f", iteration {state.iteration}"
        self.say(f"loaded {found.path}{what}", *notes)
        return state

    def _fill_adapter(self, plan: AdapterPlan, base: CheckpointDirectory | None) -> None:
        """The frozen weights, of `--load-hf` or a checkpoint, and what the adapter starts from."""
        config = self.config
        if base is None and config.checkpoint.pretrained_checkpoint is not None:
            base, _ = resume.locate_together(config.checkpoint, self.mesh, resume.locate_base)
        self._load_base()
        if base is not None:
            resume.load_frozen(base, mesh=self.mesh, stages=self.stages, optimizer=self.optimizer)
            self.say(f"loaded {base.path} (frozen weights)")
        elif config.finetune.load_hf is None:
            self.say("the frozen weights are random: neither --load-hf nor --pretrained-checkpoint is given")
        text = config.peft.prompt_init_text
        tokens = None if text is None else self.prepared.tokenizer.tokenize(text)
        plan.fill(self.stages, self.optimizer.parameter_pieces().values(), prompt_tokens=tokens)
        self.optimizer.parameters_loaded(with_state=False)

    def save_adapter(self) -> None:
        """Write the adapter where `--save-adapter` asks for it, once a step. Collective over the world."""
        directory = self.config.peft.save_adapter
        if directory is None or self.adapter is None or self._adapter_saved == self.state.iteration:
            return
        self._adapter_saved = self.state.iteration
        self._write_adapter(self.adapter, "--save-adapter", directory)
        self.say(f"saved the adapter in {directory}")

    def _write_adapter(self, adapter: AdapterPlan, flag: str, directory: str) -> None:
        base = self.config.finetune.load_hf
        save_adapter(
            directory,
            self.optimizer.parameter_pieces().values(),
            plan=adapter,
            model=self.config.model,
            mesh=self.mesh,
            vocab_size=self.prepared.vocab_size,
            sharded=self.optimizer.sharding.parameters,
            base=None if base is None else published_name(base),
            class_names=self.task.classes,
            beside=self.companions,
            flag=flag,
        )

    def _validated(self, loss: float, evaluator: Evaluator) -> None:
        """Keep the best adapter and show what the model writes, where they are asked for. Collective over the world."""
        directory, best = self.config.peft.save_best_adapter, self.state.best_valid_loss
        loss = broadcast_object(loss, self.mesh.world)  # so that all ranks agree
        if directory is not None and self.adapter is not None and loss < (math.inf if best is None else best):
            self.state.best_valid_loss = loss
            self._write_adapter(self.adapter, "--save-best-adapter", directory)
            self.say(f"saved the adapter in {directory}: validation loss {loss:.6g} is the lowest so far")
        prompts, length = self.prepared.prompts, self.config.data.seq_length
        if prompts is not None:
            written = Continuations(self.mesh, evaluator, self.prepared.tokenizer, prompts, length).texts()
            self.say(*(f"prompt: {p}\n  model: {answer}" for p, answer in zip(prompts.texts, written, strict=True)))

    def _load_base(self) -> None:
        """The weights of `--load-hf`, where it is given."""
        folder = self.config.finetune.load_hf
        if folder is None:
            return
        pieces = resume.entries(self.stages, self.optimizer, state=False)
        load_base_model(folder, mesh=self.mesh, pieces=pieces, names=self.base_names, classes=self.task.classes)
        self.optimizer.parameters_loaded(with_state=False)
        self.say(f"loaded {folder} (weights in Hugging Face format)")

    def close(self) -> None:
        """End the data-loader workers, and gathers under way."""
        self.optimizer.settle()
        self.feed.close()

    def save(self) -> None:
        """Write the adapter and a checkpoint of the present state, where they are asked for. After a skipped step
        nothing older is replaced or deleted: it may be the last that is good. Collective over the world."""
        good = self.state.skipped_in_a_row == 0
        if good:
            self.save_adapter()  # first: a disk that is too full for a checkpoint may have room for it
        config = self.config.checkpoint
        if config.save is None:
            return
        path = save_checkpoint(
            Path(config.save),
            self.state.iteration,
            mesh=self.mesh,
            pieces=resume.entries(self.stages, self.optimizer, state=config.save_optim, frozen=self.adapter is None),
            config=self.config,
            training_state=resume.training_state(
                self.config, self.state, self.optimizer, self.scaler, self.schedule, self.data_digests
            ),
            retain=Retention.from_config(config) if good else Retention(),
            beside=self.companions,
        )
        self.say(f"saved {path}")

    def _runtime(self, recorder: Recorder | None) -> PipelineRuntime:
        # This stream alone: another may hold a receive that was posted early and ends only after later actions.
        wait = torch.cuda.current_stream().synchronize if self.mesh.device.type == "cuda" else None
        return PipelineRuntime(self.executor, recorder, wait, self.transport)

    def _watched_step(self) -> StepRecord:
        """A step whose memory is measured and reported."""
        traffic, count = self.optimizer.transport.traffic, self.config.microbatches_per_step(self.mesh.dp.size)
        sent, predicted = traffic.bytes_sent, None
        with PeakMemory(self.mesh.device) as memory:
            record = self.trainer.step()
            self.optimizer.settle()
        if self.adapter is None:
            predicted = predicted_memory(self.config, self.stages, self.plan.training(count), self.mesh)
        lines = memory_report(
            self.optimizer,
            self.mesh,
            peak=memory.peak,
            sent=traffic.bytes_sent - sent,
            frozen=sum(p.nbytes for stage in self.stages for p in stage.parameters() if not p.requires_grad),
            predicted=predicted,
            microbatches=count,
        )
        self.say(*lines)
        return record

    def _trainer(self) -> Trainer:
        config, mesh = self.config, self.mesh
        recorder, folder = None, config.training.dump_grads
        if config.logging.timeline is not None:
            recorder = Timeline(config.logging.timeline, mesh.rank)
            self.optimizer.record(recorder.collective)
        outputs = self._outputs() or self.prepared.vocab_size
        return Trainer(
            config=config,
            mesh=mesh,
            executor=self.executor,
            runtime=self._runtime(recorder),
            plan=self.plan,
            optimizer=self.optimizer,
            scaler=self.scaler,
            batches=self.batches,
            schedule=self.schedule,
            state=self.state,
            microbatches=self.feed.training(),
            timers=Timers(config.logging.timing_log_level, mesh.device),
            flops_per_token=partial(training_flops_per_token, config.model, outputs, adapter=self._adapter_work()),
            on_first_gradients=None if folder is None else partial(dump_gradients, folder, self.optimizer, mesh),
        )

    def loop(self) -> Loop:
        """The whole run, after the block that describes it."""
        config, mesh = self.config, self.mesh
        evaluated = ("valid", "test") if config.validation.eval_iters > 0 else ()
        evaluator = Evaluator(
            config, mesh, self.executor, self._runtime(None), self.plan, self.feed.evaluation, self.decisions, self.say
        )
        self.say(
            opening_block(
                config,
                mesh=mesh,
                threads=self.prepared.threads,
                stages=self.stages,
                backend=self.prepared.backend,
                precision=self.precision,
                optimizer=self.optimizer,
                datasets=self.datasets,
                state=self.state,
                total_iterations=self.total_iterations,
                adapter=self._adapter_work(),
            )
        )
        return Loop(
            config=config,
            trainer=self.trainer,
            evaluator=evaluator,
            total_iterations=self.total_iterations,
            splits=[split for split in evaluated if getattr(self.datasets, split) is not None],
            sinks=make_sinks(config, self.total_iterations, self.state.iteration) if mesh.is_first else [],
            stops=StopRequests(config.training, mesh),
            profiler=Profiler(config.logging, Path(config.logging.tensorboard_dir or "profile"), mesh.rank),
            save=self.save,
            say=self.say,
            validated=partial(self._validated, evaluator=evaluator),
            peak_memory=partial(peak_process_memory, mesh),
            first_step=self._watched_step if config.logging.log_memory else None,
        )
