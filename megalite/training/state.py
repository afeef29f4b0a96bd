"""Where a run stands, besides its tensors: what a checkpoint keeps as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class TrainingState:
    """`iteration` counts steps, skipped ones included. `consumed_samples` and `consumed_tokens` count data read;
    `schedule_samples` only those of steps taken: the learning rate follows them, as in Megatron-LM. `dropout_seed` is
    the whole random state, since random numbers are a function. `nans`: steps whose loss was not a number.
    `best_valid_loss`: the lowest of all evaluations for which `--save-best-adapter` wrote an adapter."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0
    skipped: int = 0
    nans: int = 0
    dropout_seed: int = 0
    best_valid_loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Take the known fields; others are for other readers of the file."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})
