"""When a loss is a spike, and which data rollbacks have passed over.

Key idea: a run goes back to its newest checkpoint and on with data that it hasn't seen: those from the checkpoint to
the offending batch are passed over (Chowdhery et al. 2022, section 5.1). All that this needs is part of the training
state, so that a resumed run decides as an undisturbed one and repeats no rollback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.config.errors import UserError


class SpikeError(UserError):
    """Rollbacks to one checkpoint that don't help."""

    everywhere = True


@dataclass(frozen=True)
class Rollback:
    """The step with a spike, its loss, the limit that this was above; the iteration of the checkpoint; the data passed
    over, from `first_sample` to before `end_sample` in the order of all data."""

    iteration: int
    loss: float
    limit: float
    to_iteration: int
    first_sample: int
    end_sample: int


@dataclass
class SpikeHistory:
    """`losses`: of the last good steps, in order. `rollbacks`: all of the run."""

    losses: list[float] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)

    @property
    def passed_samples(self) -> int:
        """Samples that were passed over: the data go on so many behind those that count as consumed."""
        return sum(each.end_sample - each.first_sample for each in self.rollbacks)

    def limit(self, window: int, deviations: float) -> float | None:
        """Above which a loss is a spike: mean and so many (population) standard deviations of the last `window` good
        steps. None while there are fewer."""
        losses = self.losses[-window:]
        if len(losses) < window:
            return None
        mean = math.fsum(losses) / window
        return mean + deviations * math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / window)

    def add(self, loss: float, window: int) -> None:
        """A good step's loss."""
        self.losses = [*self.losses, loss][-window:]

    def in_a_row(self, to_iteration: int) -> int:
        """The last rollbacks, as far as all went to one checkpoint."""
        count = 0
        for each in reversed(self.rollbacks):
            if each.to_iteration != to_iteration:
                break
            count += 1
        return count

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpikeHistory:
        """The inverse; of an older checkpoint, which has none of it, `{}`. A TypeError or ValueError for anything
        else."""
        history = cls([float(loss) for loss in values.get("losses", [])])
        history.rollbacks = [Rollback(**each) for each in values.get("rollbacks", [])]
        if any(not 0 <= each.first_sample <= each.end_sample for each in history.rollbacks):
            raise ValueError("a rollback passed over samples that don't ascend")
        return history
