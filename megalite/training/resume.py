"""Where a run starts: fresh, from its own checkpoint, or from another model's weights; and how it is saved.

Key idea: entries are named by what they are (`model.NAME`, `optimizer.exp_avg.NAME`), never by who wrote them, so any
layout and any precision reads any other's. A float32 run keeps no second copy of its weights: it reads a half-precision
run's main parameters as its weights, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megalite.checkpoint.checkpoint import Planned, load_checkpoint, plan, read_checkpoint_config, read_training_state
from megalite.checkpoint.errors import CheckpointError, agree, on_first_rank
from megalite.checkpoint.huggingface.architecture import HEAD
from megalite.checkpoint.index import stored_tensors
from megalite.checkpoint.storage import (
    CONFIG_FILE,
    STATE_FILE,
    CheckpointDirectory,
    Retention,
    find_checkpoint,
    problem,
)
from megalite.checkpoint.upcycling import of_dense, starts_from_dense
from megalite.config.errors import UserError
from megalite.config.schema import CheckpointConfig, RunConfig
from megalite.data.tokenizer_base import Tokenizer
from megalite.distributed.collectives import all_gather_objects, broadcast_object
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, whole
from megalite.files.remote import place
from megalite.nn.module import specs_of
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.peft.checks import check_resumed_adapter, refuse_adapter
from megalite.precision.loss_scaler import LossScaler
from megalite.training.base_model import load_base_model
from megalite.training.model import TrainedModel
from megalite.training.spikes import SpikeHistory

_LOSSES = ("best_valid_loss", "valid_loss")
_MAY_BE_NONE = ("begun_iteration", "begun_samples", *_LOSSES)


@dataclass
class TrainingState:
    """`iteration` counts steps, skipped ones included. `consumed_samples` and `consumed_tokens` count data read;
    `schedule_samples` only those of steps taken: the learning rate follows them, as in Megatron-LM. `dropout_seed` is
    the whole random state, since random numbers are a function. `skipped_in_a_row`: the last steps, as far as all were
    skipped. `nans`: steps whose loss was not a number. `begun_iteration`, `begun_samples`: where the present batch
    sizes began, which is 0 where none was ever changed; None where an older version wrote this. `best_valid_loss`: the
    lowest of all evaluations for which `--save-best-adapter` wrote an adapter. `valid_loss`: of the evaluation at this
    iteration, where there was one."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    nans: int = 0
    dropout_seed: int = 0
    begun_iteration: int | None = 0
    begun_samples: int | None = 0
    best_valid_loss: float | None = None
    valid_loss: float | None = None

    def to_dict(self) -> dict[str, int | float | None]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Take the known fields; others are for other readers of the file. A TypeError for a value of another kind."""
        taken: dict[str, Any] = {"begun_iteration": None, "begun_samples": None}
        for name in (each.name for each in fields(cls) if each.name in values):
            value, number = values[name], (int, float) if name in _LOSSES else (int,)
            if type(value) not in number and not (name in _MAY_BE_NONE and value is None):
                raise TypeError(f"{name} is {value!r}, not a {'number' if float in number else 'whole number'}")
            taken[name] = value
        return cls(**taken)

    def contradictions(self) -> Iterator[str]:
        """What in it can't be true together, a line each."""
        if not 0 <= self.skipped <= self.iteration or self.nans > self.iteration:
            yield f"skipped {self.skipped} and nans {self.nans} of iteration {self.iteration}"
        if not self.schedule_samples <= self.consumed_samples <= self.consumed_tokens:
            yield (
                f"schedule_samples {self.schedule_samples}, consumed_samples {self.consumed_samples}, consumed_tokens "
                f"{self.consumed_tokens} don't ascend"
            )


@dataclass
class Progress:
    """What a checkpoint holds beside tensors, in `training_state.json`. `data`: digests of the files of tokens, on the
    first rank."""

    state: TrainingState
    schedule: Schedule
    scaler: LossScaler
    data: dict[str, str]
    spikes: SpikeHistory = field(default_factory=SpikeHistory)

    @property
    def next_sample(self) -> int:
        """Where in the order of data the run goes on."""
        return self.state.consumed_samples + self.spikes.passed_samples

    def to_dict(self, *, optimizer_steps: int, with_random_state: bool) -> dict[str, Any]:
        return {
            "training": self.state.to_dict(),
            "rng": {"dropout_seed": self.state.dropout_seed} if with_random_state else None,
            "optimizer_steps": optimizer_steps,
            "loss_scaler": self.scaler.state(),
            "schedule": self.schedule.to_dict(),
            "data": dict(self.data),
            "spikes": self.spikes.to_dict(),
        }


def restore(model: TrainedModel, progress: Progress, tokenizer: Tokenizer, say: Callable[..., None]) -> None:
    """Fill the built `model`, and where a run goes on its `progress`. `tokenizer`: of the text that a prompt starts
    from. `say`: prints lines on the first rank. Collective over the world."""
    config, mesh = model.config, model.mesh
    found, weights_only = locate_together(config.checkpoint, mesh)
    if model.adapter is not None:
        _fill_beside_adapter(model, found if weights_only else None, tokenizer, say)
        found = None if weights_only else found
    elif found is None:
        _load_base(model, say)
    if found is not None:
        if found.note:
            say(found.note)
        notes = load(found, model, progress, weights_only=weights_only)
        what = " (only weights)" if weights_only else f", iteration {progress.state.iteration}"
        say(f"loaded {found.path}{what}", *notes)
    elif config.checkpoint.load is not None and not weights_only:
        say(f"--load {config.checkpoint.load} holds no checkpoint: starting a new run")


def _load_base(model: TrainedModel, say: Callable[..., None]) -> None:
    """The weights of `--load-hf`, where it is given."""
    folder = model.config.finetune.load_hf
    if folder is not None:
        load_base_model(
            folder,
            mesh=model.mesh,
            pieces=model.entries(state=False, frozen=True),
            names=model.base_names,
            classes=model.classes,
            upcycled=model.config.model.moe_use_upcycling,
        )
        model.optimizer.parameters_loaded(with_state=False)
        say(f"loaded {folder} (weights in Hugging Face format)")


def _fill_beside_adapter(
    model: TrainedModel, base: CheckpointDirectory | None, tokenizer: Tokenizer, say: Callable[..., None]
) -> None:
    """The frozen weights, of `--load-hf` or a checkpoint, and what the adapter starts from."""
    assert model.adapter is not None
    config, optimizer = model.config, model.optimizer
    if base is None and config.checkpoint.pretrained_checkpoint is not None:
        base, _ = locate_together(replace(config.checkpoint, load=None), model.mesh)
    _load_base(model, say)
    if base is not None:
        _load_frozen(base, model)
        say(f"loaded {base.path} (frozen weights)")
    elif config.finetune.load_hf is None:
        say("the frozen weights are random: neither --load-hf nor --pretrained-checkpoint is given")
    text = config.peft.prompt_init_text
    tokens = None if text is None else tokenizer.tokenize(text)
    model.adapter.fill(model.stages, optimizer.parameter_pieces().values(), prompt_tokens=tokens)
    optimizer.parameters_loaded(with_state=False)


def _load_frozen(directory: CheckpointDirectory, model: TrainedModel) -> None:
    """Fill the weights that aren't trained from another model's checkpoint."""
    refuse_adapter(directory)
    pieces = (whole(f"model.{name}", p, spec) for name, p, spec in specs_of(model.stages) if not p.requires_grad)
    load_checkpoint(directory, mesh=model.mesh, pieces=_named_by_source(pieces, directory, model))


def plan_save(
    model: TrainedModel, progress: Progress, root: str, *, retain: Retention, beside: Mapping[str, bytes]
) -> Planned:
    """The checkpoint of the present state to write into `root`. See `checkpoint.plan`."""
    config = model.config.checkpoint
    return plan(
        place(root),
        progress.state.iteration,
        mesh=model.mesh,
        pieces=model.entries(state=config.save_optim, frozen=model.adapter is None),
        config=model.config,
        training_state=progress.to_dict(optimizer_steps=model.optimizer.steps, with_random_state=config.save_rng),
        retain=retain,
        beside=beside,
    )


def _named_by_source(pieces: Iterable[Piece], directory: CheckpointDirectory, model: TrainedModel) -> Iterator[Piece]:
    """Pieces named by the stored entries that fill them: a wide weight takes a half-precision run's main parameter, and
    a main parameter takes a wide run's weight."""
    stored, wide = set(stored_tensors(directory)), model.precision.wide
    for piece in pieces:
        key, main = piece.name, piece.name.replace("model.", "optimizer.main.", 1)
        if key.startswith("model.") and piece.flat.dtype == wide and main in stored:
            key = main
        elif key.startswith("optimizer.main.") and key not in stored:
            key = key.replace("optimizer.main.", "model.", 1)
        yield piece._replace(name=key)


def locate(config: CheckpointConfig) -> tuple[CheckpointDirectory | None, bool]:
    """The checkpoint to start from, and whether only its weights are wanted.

    A UserError where one is demanded and there is none.
    """
    found = find_checkpoint(config.load, config.ckpt_step) if config.load is not None else None
    if found is not None:
        return found, config.finetune
    if config.pretrained_checkpoint is not None:
        found = find_checkpoint(config.pretrained_checkpoint)
        if found is None:
            raise UserError(f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint")
        return found, True
    if config.load is not None and config.exit_on_missing_checkpoint:
        raise UserError(f"--load {config.load} holds no checkpoint, and --exit-on-missing-checkpoint is set")
    return None, False


def locate_together(config: CheckpointConfig, mesh: Mesh) -> tuple[CheckpointDirectory | None, bool]:
    """As `locate`, decided by the first rank, so that no two ranks start from different ones.

    All ranks raise the same error where one of them can't see it whole. Collective over the world.
    """
    located: list[tuple[CheckpointDirectory | None, bool]] = []
    on_first_rank(lambda: located.append(locate(config)), mesh.world)
    found, weights_only = broadcast_object(located[0] if located else None, mesh.world)
    agree(None if found is None else problem(found.path), mesh.world)
    return found, weights_only


def load(directory: CheckpointDirectory, model: TrainedModel, progress: Progress, *, weights_only: bool) -> list[str]:
    """Fill the model, and unless only its weights are wanted the optimizer and `progress`; notes for the user.
    Collective over the world."""
    config, optimizer = model.config, model.optimizer
    with_optimizer = config.checkpoint.load_optim and not weights_only
    stored = stored_tensors(directory)
    new_head = weights_only and config.finetune.task == "classification" and f"model.{HEAD}" not in stored
    if config.finetune.task == "classification" and not new_head:
        _check_classes(directory, config.finetune.class_names)
    notes = check_resumed_adapter(directory, config, weights_only=weights_only)
    if with_optimizer and not any(key.startswith("optimizer.") for key in stored):
        raise CheckpointError(
            f"{directory.path} holds no optimizer state: load its weights alone with --no-load-optim or --finetune"
        )
    entries = model.entries(state=with_optimizer, frozen=model.adapter is None, to_fill=True)
    new = {f"model.{HEAD}"} if new_head else set()
    if with_optimizer:
        histories = {f"optimizer.{key}": piece.spec.shape for key, piece in model.scaling.state()}
        missing = {key for key, shape in histories.items() if key not in stored or stored[key].shape != shape}
        notes += _anew_note(directory, len(missing), model)
        shares = {f"optimizer.{key}" for key, _ in model.balance.state()}  # without: equal ones
        new |= missing | (shares - stored.keys())
    wanted: Iterable[Piece] = (piece for piece in entries if piece.name not in new)
    if config.model.moe_use_upcycling and starts_from_dense(directory, weights_only=weights_only):
        wanted = of_dense(wanted)
    pieces = _named_by_source(wanted, directory, model)
    load_checkpoint(directory, mesh=model.mesh, pieces=pieces, strict=not new_head)
    model.scaling.loaded()  # first: weights that are stored in FP8 are rounded by it
    optimizer.parameters_loaded(with_state=with_optimizer)
    if weights_only:
        return []
    values = read_training_state(directory)
    state = progress.state = _read_state(directory, values, config)
    progress.spikes = _read_spikes(directory, values)
    notes += [
        f"note: {path} has changed since {directory.path} was saved: the run continues in the middle of the new data"
        for path, digest in values.get("data", {}).items()
        if progress.data.get(path, digest) != digest
    ]
    if not config.checkpoint.load_rng or values.get("rng") is None:
        state.dropout_seed = config.training.seed
    elif state.dropout_seed != config.training.seed:
        notes.append(
            f"dropout goes on with the checkpoint's seed {state.dropout_seed} instead of "
            f"--seed {config.training.seed}; --no-load-rng changes that"
        )
    if with_optimizer:
        optimizer.set_steps(int(values["optimizer_steps"]))
        progress.scaler.load_state(values["loss_scaler"])
    stored_schedule = Schedule.from_dict(values["schedule"], progress.schedule)
    progress.schedule, more = _choose_schedule(config, progress.schedule, stored_schedule)
    return notes + more


def _anew_note(directory: CheckpointDirectory, missing: int, model: TrainedModel) -> list[str]:
    """Says that FP8 histories start anew, `missing` of them on this rank. Collective over the pipeline's ranks."""
    if model.precision.fp8 is None or not (count := sum(all_gather_objects(missing, model.mesh.pp))):
        return []
    what = f"FP8 history of --fp8-amax-history-len {model.precision.fp8.length} for {count} linear layers"
    return [f"note: {directory.path} has no {what}: it starts anew there"]


def _read_state(directory: CheckpointDirectory, values: Mapping[str, Any], config: RunConfig) -> TrainingState:
    """The state that a checkpoint tells and `config` goes on from. A CheckpointError where it can't be true."""
    path = directory.path / STATE_FILE
    try:
        state = TrainingState.from_dict(values["training"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} tells no training state: {error}") from error
    wrong_numbers, batches = list(state.contradictions()), None
    if state.begun_iteration is not None and state.begun_samples is not None:
        batches = BatchSchedule.from_config(read_checkpoint_config(directory))
        samples = batches.samples_after(state.iteration - state.begun_iteration, state.begun_samples)
        if samples != state.consumed_samples:
            wrong_numbers.append(
                f"consumed_samples is {state.consumed_samples}, but by the batch sizes in {CONFIG_FILE} iteration "
                f"{state.iteration} ends at {samples}"
            )
    for wrong in wrong_numbers:
        raise CheckpointError(
            f"{path} contradicts itself: {wrong}. It was changed after it was written: restore it, or load another "
            "checkpoint with --ckpt-step, or its weights alone with --finetune"
        )
    if batches != BatchSchedule.from_config(config):
        state.begun_iteration, state.begun_samples = state.iteration, state.consumed_samples
    return state


def _read_spikes(directory: CheckpointDirectory, values: Mapping[str, Any]) -> SpikeHistory:
    """The last losses and all rollbacks; none in an older checkpoint. A CheckpointError where they make no sense."""
    try:
        return SpikeHistory.from_dict(values.get("spikes", {}))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory.path / STATE_FILE} tells no losses and rollbacks: {error}") from error


def _check_classes(directory: CheckpointDirectory, classes: list[str] | None) -> None:
    """Raise a CheckpointError where a classifier's classes aren't those of this run."""
    theirs = read_checkpoint_config(directory).finetune.class_names
    if theirs is not None and theirs != classes:
        raise CheckpointError(
            f"{directory.path} was trained with --class-names {' '.join(theirs)}, and this run has "
            f"{' '.join(classes or [])}: give the checkpoint's, in its order"
        )


def _choose_schedule(config: RunConfig, mine: Schedule, stored: Schedule) -> tuple[Schedule, list[str]]:
    """The command line's schedule, or the checkpoint's where asked; a difference is told unless it was asked for."""
    rate = config.learning_rate
    if rate.use_checkpoint_opt_param_scheduler:
        return stored, []
    if mine == stored or rate.override_opt_param_scheduler:
        return mine, []
    theirs = stored.to_dict()
    changed = [f"{key} {theirs[key]} → {value}" for key, value in mine.to_dict().items() if theirs[key] != value]
    return mine, [
        "the command line's schedule replaces the checkpoint's: " + ", ".join(changed) + " "
        "(--override-opt_param-scheduler hides this line; --use-checkpoint-opt_param-scheduler takes the checkpoint's)"
    ]
