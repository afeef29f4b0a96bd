"""All parts of a run, built in order.

Key idea: each part is made once, here, from the configuration and those made before it, and handed to what needs it.
Nothing is trained, evaluated or written yet: `Loop` does that with the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megalite.checkpoint.errors import on_first_rank
from megalite.checkpoint.huggingface.travel import companions
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.storage import Retention
from megalite.config.errors import UserError
from megalite.config.fields import output_folders
from megalite.config.schema import RunConfig
from megalite.data.gpt_dataset import Datasets
from megalite.data.splits import data_digests
from megalite.distributed.mesh import Mesh
from megalite.distributed.turns import first_of_machine_first
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.optimizer.transport import Transport
from megalite.peft.adapter import AdapterSaver
from megalite.pipeline.runtime import Recorder
from megalite.precision.loss_scaler import LossScaler
from megalite.training import resume
from megalite.training.diagnostics import TimelineRecorder, dump_gradients
from megalite.training.engine import Engine
from megalite.training.model import TrainedModel, build_model
from megalite.training.prepare import Prepared
from megalite.training.report import say
from megalite.training.resume import Progress, TrainingState
from megalite.training.spikes import Rollback
from megalite.training.stragglers import ComputeTime
from megalite.training.task import Feed
from megalite.training.trainer import Trainer


@dataclass
class Run:
    """One process's parts of a run. `companions`: on the first rank, the small files to write beside weights.
    `adapter_saver`: None where the whole model is trained. `computing`: with `--log-straggler`."""

    prepared: Prepared
    datasets: Datasets
    companions: dict[str, bytes]
    model: TrainedModel
    progress: Progress
    feed: Feed
    engine: Engine
    trainer: Trainer
    saver: Saver
    adapter_saver: AdapterSaver | None
    computing: ComputeTime | None = None

    @property
    def config(self) -> RunConfig:
        return self.model.config

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def optimizer(self) -> Optimizer:
        return self.model.optimizer

    @property
    def state(self) -> TrainingState:
        return self.progress.state

    def save_adapter(self) -> None:
        """Have the adapter written where `--save-adapter` asks for it, once a step. Collective over the world."""
        if self.adapter_saver is not None:
            self.adapter_saver.save(self.state.iteration)

    def save(self) -> None:
        """Have the adapter and a checkpoint of the present state written, where they are asked for. After a skipped
        step nothing older is replaced or deleted: it may be the last that is good. Collective over the world."""
        good, config = self.state.skipped_in_a_row == 0, self.config.checkpoint
        if good:
            self.save_adapter()  # first: a disk that is too full for a checkpoint may have room for it
        if config.save is not None:
            retain = Retention.from_config(config) if good else Retention()
            self.saver.save(
                resume.plan_save(self.model, self.progress, config.save, retain=retain, beside=self.companions)
            )

    def roll_back(self, to_iteration: int, loss: float, limit: float) -> Rollback:
        """Go back from the present step, whose `loss` was above `limit`, to a checkpoint of this run in `--save`, and
        pass over the data that were read since. Collective over the world."""
        end, history, best = self.progress.next_sample, self.progress.spikes, self.state.best_valid_loss
        iteration, config = self.state.iteration, self.config.checkpoint
        self.saver.wait()
        found, _ = resume.locate_together(replace(config, load=config.save, ckpt_step=to_iteration), self.mesh)
        assert found is not None
        self.optimizer.finish_gathers()
        resume.load(found, self.model, self.progress, weights_only=False)
        first = self.state.consumed_samples + history.passed_samples
        rollback = Rollback(iteration, loss, limit, to_iteration, first, end)
        self.progress.spikes.rollbacks = [*history.rollbacks, rollback]
        self.state.best_valid_loss = best  # its adapter is on the disk
        self.feed.close()
        self.trainer.microbatches = self.feed.training()
        return rollback

    def close(self) -> None:
        """End the data-loader workers, and gathers and saves under way."""
        self.saver.wait()
        self.optimizer.finish_gathers()
        self.feed.close()


def build_run(prepared: Prepared, mesh: Mesh, *, transport: Transport | None = None) -> Run:
    """Build model, optimizer and data, and load what `--load` names. Collective over the world.

    `transport`: for the optimizer's data-parallel collectives, in place of the mesh's own.
    """
    config, task = prepared.config, prepared.task
    say(mesh, *prepared.notes)
    datasets = _datasets(prepared, mesh)  # first, since it may say how many steps there are
    beside = _companions(config, datasets, mesh)
    progress = Progress(
        TrainingState(dropout_seed=config.training.seed),
        Schedule.from_config(config, BatchSchedule.from_config(config)),
        LossScaler.from_config(config.precision),
        data_digests(config) if mesh.is_first else {},
    )
    model = build_model(
        config,
        mesh,
        vocab_size=prepared.vocab_size,
        backend=prepared.backend,
        classes=task.classes,
        transport=transport,
    )
    tell = partial(say, mesh)
    resume.restore(model, progress, prepared.tokenizer, tell)
    feed = Feed(task, mesh, datasets, progress)
    recorders: list[Recorder] = []
    computing, gradients = None, config.training.dump_grads
    if config.logging.timeline is not None:
        timeline = TimelineRecorder(config.logging.timeline, mesh.rank)
        model.optimizer.record(timeline.collective)
        recorders.append(timeline)
    if config.logging.log_straggler:
        computing = ComputeTime(mesh)
        recorders.append(computing)
    engine = Engine(model, task.objective(), recorders)
    trainer = Trainer(model, engine, progress, feed.training())
    if gradients is not None:
        trainer.on_first_gradients = partial(dump_gradients, gradients, model.optimizer, mesh)
    saver, adapter_saver = Saver(mesh, tell, background=config.checkpoint.async_save), None
    if model.adapter is not None:
        adapter_saver = AdapterSaver(
            model.adapter,
            model.optimizer,
            config.finetune.load_hf,
            classes=task.classes,
            beside=beside,
            saver=saver,
            say=tell,
        )
        progress.state.best_valid_loss = adapter_saver.standing_best(progress.state.best_valid_loss)
    return Run(prepared, datasets, beside, model, progress, feed, engine, trainer, saver, adapter_saver, computing)


def _datasets(prepared: Prepared, mesh: Mesh) -> Datasets:
    """Each machine's first rank builds the indices, then the others find them in the cache."""
    config = prepared.config
    datasets = first_of_machine_first(prepared.task.datasets, mesh, first=prepared.environment.local_rank == 0)
    say(mesh, *datasets.notes)
    for flag, value in (
        ("--save-best-adapter", config.peft.save_best_adapter),
        ("--keep-best", config.checkpoint.keep_best),
        ("--eval-prompt", config.finetune.eval_prompt),
    ):
        if value is not None and datasets.valid is None:
            raise UserError(f"{flag} needs a validation set, and the data flags give none")
    return datasets


def _companions(config: RunConfig, datasets: Datasets, mesh: Mesh) -> dict[str, bytes]:
    """On the first rank the small files to write beside weights, read now: at the end they may be gone."""
    files: dict[str, bytes] = {}
    if output_folders(config):
        read = partial(companions, config, conversations=datasets.conversations)
        on_first_rank(lambda: files.update(read()), mesh.world)
    return files
