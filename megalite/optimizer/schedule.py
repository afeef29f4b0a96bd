"""Batch size, learning rate and weight decay as functions of consumed samples.

Key idea: nothing here has state. A schedule given in iterations is converted to samples through the batch-size ramp, so
a ramp-up neither shortens a warm-up nor lets a decay run past its end. Formulas as Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megalite.config.batches import batch_size_at, batch_size_stages
from megalite.config.schema import RunConfig


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size: `stages` [(first sample, size), ...], the last of which never ends."""

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def from_config(cls, config: RunConfig) -> BatchSchedule:
        """Of a resolved configuration: constant, ramped up or by steps."""
        return cls(tuple(batch_size_stages(config.training, config.data.seq_length)))

    @property
    def final(self) -> int:
        return self.stages[-1][1]

    def at(self, consumed: int) -> int:
        """Global batch size of the step that begins after `consumed` samples."""
        return batch_size_at(list(self.stages), consumed)

    def is_final(self, consumed: int) -> bool:
        """Whether the size will not change any more."""
        return consumed >= self.stages[-1][0]

    def total_iterations(self, config: RunConfig) -> int:
        """Steps of the whole run."""
        if config.training.train_samples is not None:
            return self.iterations_for(config.training.train_samples)
        assert config.training.train_iters is not None
        return config.training.train_iters

    def samples_after(self, iterations: int, begun: int = 0) -> int:
        """Samples consumed at the end of `iterations` steps that begin after `begun` samples."""
        consumed = begun
        for done in range(iterations):
            size = self.at(consumed)
            if self.is_final(consumed):
                return consumed + (iterations - done) * self.final
            consumed += size
        return consumed

    def iterations_for(self, samples: int) -> int:
        """Steps that fit into `samples`."""
        consumed = iterations = 0
        while consumed < samples:
            size = self.at(consumed)
            if self.is_final(consumed):
                return iterations + (samples - consumed) // self.final
            consumed += size
            iterations += 1
        return iterations


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay; all lengths in samples."""

    max_lr: float
    min_lr: float
    style: str
    warmup: float
    warmup_init: float
    decay: int
    wsd_style: str
    wsd_decay: int
    decoupled_max_lr: float | None
    decoupled_min_lr: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    weight_decay_samples: int

    @classmethod
    def from_config(cls, config: RunConfig, batches: BatchSchedule) -> Schedule:
        """The schedule of a resolved configuration."""
        rate, training, optimizer = config.learning_rate, config.training, config.optimizer
        if training.train_samples is not None:
            total = training.train_samples
            decay = rate.lr_decay_samples or total
            warmup: float = rate.lr_warmup_samples
            wsd = rate.lr_wsd_decay_samples or 0
        else:
            assert training.train_iters is not None
            total = batches.samples_after(training.train_iters)
            decay_iters = rate.lr_decay_iters or training.train_iters
            decay = batches.samples_after(decay_iters)
            warmup = batches.samples_after(rate.lr_warmup_iters)
            wsd = decay - batches.samples_after(decay_iters - (rate.lr_wsd_decay_iters or 0))
        if rate.lr_warmup_fraction is not None:
            warmup = rate.lr_warmup_fraction * decay
        constant = optimizer.weight_decay
        return cls(
            max_lr=rate.lr,
            min_lr=rate.min_lr,
            style=rate.lr_decay_style,
            warmup=warmup,
            warmup_init=rate.lr_warmup_init,
            decay=decay,
            wsd_style=rate.lr_wsd_decay_style,
            wsd_decay=wsd,
            decoupled_max_lr=rate.decoupled_lr,
            decoupled_min_lr=rate.min_lr if rate.decoupled_min_lr is None else rate.decoupled_min_lr,
            start_weight_decay=constant if optimizer.start_weight_decay is None else optimizer.start_weight_decay,
            end_weight_decay=constant if optimizer.end_weight_decay is None else optimizer.end_weight_decay,
            weight_decay_style=optimizer.weight_decay_incr_style,
            weight_decay_samples=total,
        )

    def learning_rate(self, samples: int, *, decoupled: bool = False) -> float:
        """Rate of the step that begins after `samples` samples."""
        top, bottom = self.max_lr, self.min_lr
        if decoupled and self.decoupled_max_lr is not None:
            top, bottom = self.decoupled_max_lr, self.decoupled_min_lr
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + (top - self.warmup_init) * samples / self.warmup
        if self.style == "constant":
            return top
        if samples > self.decay:
            return bottom
        if self.style == "inverse-square-root":
            return max(bottom, top * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        return bottom + self._decay_factor(samples) * (top - bottom)

    def _decay_factor(self, samples: int) -> float:
        """From 1 after warm-up to 0 at the end of the decay."""
        if self.style == "WSD":
            begin = self.decay - self.wsd_decay
            return 1.0 if samples <= begin else _shape(self.wsd_style, (samples - begin) / self.wsd_decay)
        return _shape(self.style, (samples - self.warmup) / (self.decay - self.warmup))

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that begins after `samples` samples."""
        share = min(1.0, samples / max(1, self.weight_decay_samples))
        if self.weight_decay_style == "constant":
            share = 1.0
        elif self.weight_decay_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1.0 - share)) + 1.0)
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)

    def to_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], default: Schedule) -> Schedule:
        """The inverse; what another version didn't write is as in `default`."""
        known = {field.name for field in fields(cls)}
        return replace(default, **{key: value for key, value in values.items() if key in known})


def _shape(style: str, share: float) -> float:
    """A decay from 1 at share 0 to 0 at share 1. `minus_sqrt`: Hägele et al. 2024."""
    if style == "linear":
        return 1.0 - share
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * share) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**share - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(share)
    raise ValueError(f"unknown decay style {style!r}")
