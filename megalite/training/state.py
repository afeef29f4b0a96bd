"""Where a run stands, besides its tensors: what a checkpoint keeps as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

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
