"""Where a run starts: fresh, from its own checkpoint, or from another model's weights; and how it is saved.

Key idea: entries are named by what they are (`model.NAME`, `optimizer.exp_avg.NAME`), never by who wrote them, so any
layout and any precision reads any other's. A float32 run keeps no second copy of its weights: it reads a half-precision
run's main parameters as its weights, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.checkpoint import load_checkpoint, read_config, read_training_state
from megalite.checkpoint.errors import CheckpointError, agree
from megalite.checkpoint.huggingface.architecture import HEAD
from megalite.checkpoint.metadata import describe
from megalite.checkpoint.storage import CONFIG_FILE, STATE_FILE, CheckpointDirectory, find_checkpoint, problem
from megalite.config.check_peft import lora_parts, target_names
from megalite.config.errors import UserError
from megalite.config.fields import all_fields
from megalite.config.schema import CheckpointConfig, RunConfig
from megalite.distributed.collectives import broadcast_object
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, whole
from megalite.models.gpt import GPTStage
from megalite.nn.module import specs_of
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.precision.loss_scaler import LossScaler

_MAY_BE_NONE = ("begun_iteration", "begun_samples", "best_valid_loss")


@dataclass
class TrainingState:
    """`iteration` counts steps, skipped ones included. `consumed_samples` and `consumed_tokens` count data read;
    `schedule_samples` only those of steps taken: the learning rate follows them, as in Megatron-LM. `dropout_seed` is
    the whole random state, since random numbers are a function. `skipped_in_a_row`: the last steps, as far as all were
    skipped. `nans`: steps whose loss was not a number. `begun_iteration`, `begun_samples`: where the present batch
    sizes began, which is 0 where none was ever changed; None where an older version wrote this. `best_valid_loss`: the
    lowest of all evaluations for which `--save-best-adapter` wrote an adapter."""

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

    def to_dict(self) -> dict[str, int | float | None]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Take the known fields; others are for other readers of the file. A TypeError for a value of another kind."""
        taken: dict[str, Any] = {"begun_iteration": None, "begun_samples": None}
        for name in (field.name for field in fields(cls) if field.name in values):
            value, number = values[name], (int, float) if name == "best_valid_loss" else (int,)
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


def entries(stages: Sequence[GPTStage], optimizer: Optimizer, *, state: bool, frozen: bool = True) -> Iterator[Piece]:
    """Everything that a checkpoint holds as tensors; `state`: with the optimizer's; `frozen`: with weights that aren't
    trained."""
    trained = optimizer.parameter_pieces()
    for name, parameter, spec in specs_of(stages):
        piece = trained.get(name)
        if piece is None and frozen and not parameter.requires_grad:
            piece = whole(name, parameter, spec)
        if piece is not None:  # none where all of a sharded parameter is elsewhere
            yield piece._replace(name=f"model.{name}")
    if state:
        for key, piece in optimizer.named_state():
            yield piece._replace(name=f"optimizer.{key}")


def load_frozen(
    directory: CheckpointDirectory, *, mesh: Mesh, stages: Sequence[GPTStage], optimizer: Optimizer
) -> None:
    """Fill the weights that aren't trained from another model's checkpoint. Collective over the world."""
    _refuse_adapter(directory, read_config(directory))
    stored, half = set(describe(directory)), optimizer.precision.needs_main_parameters
    pieces = (whole(f"model.{name}", p, spec) for name, p, spec in specs_of(stages) if not p.requires_grad)
    named = (piece._replace(name=source_key(piece.name, stored, half=half)) for piece in pieces)
    load_checkpoint(directory, mesh=mesh, pieces=named)


def source_key(key: str, stored: set[str], *, half: bool) -> str:
    """Which stored entry fills `key`: a wide weight takes a half-precision run's main parameter, and a main parameter
    takes a wide run's weight."""
    main = key.replace("model.", "optimizer.main.", 1)
    if key.startswith("model.") and not half and main in stored:
        return main
    if key.startswith("optimizer.main.") and key not in stored:
        return key.replace("optimizer.main.", "model.", 1)
    return key


def locate(config: CheckpointConfig) -> tuple[CheckpointDirectory | None, bool]:
    """The checkpoint to start from, and whether only its weights are wanted.

    A UserError where one is demanded and there is none.
    """
    found = find_checkpoint(Path(config.load), config.ckpt_step) if config.load is not None else None
    if found is not None:
        return found, config.finetune
    if config.pretrained_checkpoint is not None:
        found = find_checkpoint(Path(config.pretrained_checkpoint), None)
        if found is None:
            raise UserError(f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint")
        return found, True
    if config.load is not None and config.exit_on_missing_checkpoint:
        raise UserError(f"--load {config.load} holds no checkpoint, and --exit-on-missing-checkpoint is set")
    return None, False


def locate_base(config: CheckpointConfig) -> tuple[CheckpointDirectory | None, bool]:
    """As `locate`, of the model that a resumed run has its adapter beside."""
    return locate(replace(config, load=None))


def locate_together(
    config: CheckpointConfig,
    mesh: Mesh,
    find: Callable[[CheckpointConfig], tuple[CheckpointDirectory | None, bool]] = locate,
) -> tuple[CheckpointDirectory | None, bool]:
    """As `locate`, or what `find` is, decided by the first rank, so that no two ranks start from different ones.

    All ranks raise the same error where one of them can't see it whole. Collective over the world.
    """
    answer: tuple[CheckpointDirectory | None, bool] = (None, False)
    error = None
    if mesh.is_first:
        try:
            answer = find(config)
        except UserError as raised:
            error = str(raised)
    answer, error = broadcast_object((answer, error), mesh.world)
    if error is not None:
        raise CheckpointError(error)
    found = answer[0]
    agree(None if found is None else problem(found.path), mesh.world)
    return answer


def load(
    directory: CheckpointDirectory,
    *,
    config: RunConfig,
    mesh: Mesh,
    stages: Sequence[GPTStage],
    optimizer: Optimizer,
    scaler: LossScaler,
    schedule: Schedule,
    weights_only: bool,
    data: Mapping[str, str],
) -> tuple[TrainingState, Schedule, list[str]]:
    """Fill model and optimizer; the state and schedule to go on with, and notes for the user. Collective.

    `data`: the digests of this run's data, on the first rank.
    """
    with_optimizer = config.checkpoint.load_optim and not weights_only
    stored = set(describe(directory))
    new_head = weights_only and config.finetune.task == "classification" and f"model.{HEAD}" not in stored
    if config.finetune.task == "classification" and not new_head:
        _check_classes(directory, config.finetune.class_names)
    notes = check_adapter(directory, config, weights_only=weights_only)
    if with_optimizer and not any(key.startswith("optimizer.") for key in stored):
        raise CheckpointError(
            f"{directory.path} holds no optimizer state: load its weights alone with --no-load-optim or --finetune"
        )
    half = optimizer.precision.needs_main_parameters
    load_checkpoint(
        directory,
        mesh=mesh,
        pieces=(
            piece._replace(name=source_key(piece.name, stored, half=half))
            for piece in entries(stages, optimizer, state=with_optimizer, frozen=config.peft.peft == "none")
            if not (new_head and piece.name == f"model.{HEAD}")
        ),
        strict=not new_head,
    )
    optimizer.parameters_loaded(with_state=with_optimizer)
    values = read_training_state(directory)
    fresh = TrainingState(dropout_seed=config.training.seed)
    if weights_only:
        return fresh, schedule, []
    state = _read_state(directory, values, config)
    notes += [
        f"note: {path} has changed since {directory.path} was saved: the run continues in the middle of the new data"
        for path, digest in values.get("data", {}).items()
        if data.get(path, digest) != digest
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
        scaler.load_state(values["loss_scaler"])
    schedule, schedule_notes = choose_schedule(config, schedule, Schedule.from_dict(values["schedule"], schedule))
    return state, schedule, notes + schedule_notes


def _read_state(directory: CheckpointDirectory, values: Mapping[str, Any], config: RunConfig) -> TrainingState:
    """The state that a checkpoint tells and `config` goes on from. A CheckpointError where it can't be true."""
    path = directory.path / STATE_FILE
    try:
        state = TrainingState.from_dict(values["training"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} tells no training state: {error}") from error
    wrong_numbers, batches = list(state.contradictions()), None
    if state.begun_iteration is not None and state.begun_samples is not None:
        batches = BatchSchedule.from_config(read_config(directory))
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


def _check_classes(directory: CheckpointDirectory, classes: list[str] | None) -> None:
    """Raise a CheckpointError where a classifier's classes aren't those of this run."""
    theirs = read_config(directory).finetune.class_names
    if theirs is not None and theirs != classes:
        raise CheckpointError(
            f"{directory.path} was trained with --class-names {' '.join(theirs)}, and this run has "
            f"{' '.join(classes or [])}: give the checkpoint's, in its order"
        )


def check_adapter(directory: CheckpointDirectory, config: RunConfig, *, weights_only: bool) -> list[str]:
    """What differs from the run that saved an adapter, one line each; nothing where neither run has one.

    A CheckpointError where the kinds differ, or where the adapter's model isn't named: the checkpoint doesn't hold it.
    """
    saved = read_config(directory)
    if weights_only or config.peft.peft == "none":
        _refuse_adapter(directory, saved)
        return []
    theirs, ours = (_base(each) for each in (saved, config))
    if saved.peft.peft != config.peft.peft:
        raise CheckpointError(
            f"{directory.path} is of a run with --peft {saved.peft.peft}, and this one has --peft {config.peft.peft}; "
            "a checkpoint of the model itself is given as --pretrained-checkpoint"
        )
    if theirs and not ours:
        raise CheckpointError(f"{directory.path} holds an adapter alone, trained with {theirs}: give that too")
    lines = [f"{ours} replaces the checkpoint's {theirs}"] if theirs and theirs != ours else []
    fields = all_fields()
    for name in _SHAPES[saved.peft.peft] if saved.peft.load_adapter is config.peft.load_adapter is None else ():
        before, now = _shaping(saved, name), _shaping(config, name)
        if before != now:
            show = fields[f"peft.{name}"].show
            raise CheckpointError(f"{directory.path} was trained with {show(before)}, and this run has {show(now)}")
    for name in ("lora_alpha", "use_rslora") if saved.peft.peft == "lora" else ():
        before, now = getattr(saved.peft, name), getattr(config.peft, name)
        if before != now:
            show = fields[f"peft.{name}"].show
            lines.append(f"{show(now)} replaces the checkpoint's {show(before)}")
    return lines


_SHAPES = {
    "lora": ("lora_rank", "lora_target_modules"),
    "prefix": ("num_virtual_tokens", "prefix_projection", "prefix_hidden_size"),
    "prompt": ("num_virtual_tokens",),
}
"""Of each kind of adapter, what its weights' shapes follow from."""


def _shaping(config: RunConfig, name: str) -> Any:
    """The value of a field of `peft`, for targets what it means."""
    value = getattr(config.peft, name)
    return lora_parts(config.model, target_names(config.peft)) if name == "lora_target_modules" else value


def _refuse_adapter(directory: CheckpointDirectory, saved: RunConfig) -> None:
    """Raise a CheckpointError for a checkpoint that holds no model."""
    if saved.peft.peft != "none":
        raise CheckpointError(
            f"{directory.path} holds only what a run with --peft {saved.peft.peft} trained beside a model: --load it "
            "with that run's flags, or start from what --save-adapter wrote with --load-adapter"
        )


def _base(config: RunConfig) -> str | None:
    """The flag that names an adapter's model."""
    if config.finetune.load_hf is not None:
        return f"--load-hf {config.finetune.load_hf}"
    folder = config.checkpoint.pretrained_checkpoint
    return None if folder is None else f"--pretrained-checkpoint {folder}"


def choose_schedule(config: RunConfig, mine: Schedule, stored: Schedule) -> tuple[Schedule, list[str]]:
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


def training_state(
    config: RunConfig,
    state: TrainingState,
    optimizer: Optimizer,
    scaler: LossScaler,
    schedule: Schedule,
    data: Mapping[str, str],
) -> dict[str, Any]:
    """What `training_state.json` holds. `data`: digests of the data."""
    return {
        "training": state.to_dict(),
        "rng": {"dropout_seed": state.dropout_seed} if config.checkpoint.save_rng else None,
        "optimizer_steps": optimizer.steps,
        "loss_scaler": scaler.state(),
        "schedule": schedule.to_dict(),
        "data": dict(data),
    }
