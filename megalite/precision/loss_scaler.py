"""Loss scaling for float16 (Micikevicius et al. 2018), with Megatron-LM's hysteresis.

Key idea: the state is three numbers; `update` is told after each step whether the gradients were finite, which all
ranks decided together, so every rank holds the same scale.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megalite.config.schema import PrecisionConfig


@dataclass
class LossScaler:
    """`scale` multiplies the loss. It doubles after `window` good steps and halves once `hysteresis` bad ones came
    since it last grew; never below `minimum`. A constant scale has `dynamic` False."""

    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    tolerance: int = 2

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> LossScaler:
        if not config.fp16:
            return cls()
        if config.loss_scale is not None:
            return cls(scale=float(config.loss_scale))
        return cls(
            scale=float(config.initial_loss_scale),
            dynamic=True,
            minimum=float(config.min_loss_scale),
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            tolerance=config.hysteresis,
        )

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step."""
        if not self.dynamic:
            return
        if not finite:
            self.good_steps = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2.0, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps = 0
            self.tolerance = self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float | int | bool]:
        """For the checkpoint."""
        return asdict(self)

    def load_state(self, state: dict[str, float | int | bool]) -> None:
        """Take over scale and counters; whether it is dynamic stays as configured."""
        if self.dynamic and state.get("dynamic"):
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
            self.tolerance = int(state["tolerance"])
