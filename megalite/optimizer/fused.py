"""The fused kernels that update long segments: torch's, NVIDIA Apex's or Transformer Engine's.

Key idea: whoever updates, the segments and their state are the same tensors, so a run may be resumed with another one.
Torch's kernel takes unscaling and clipping as a divisor of the gradients; for the others, and in float64 (torch takes
the divisor in float32), the gradients are multiplied first.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.config.errors import FlagError
from megalite.config.schema import OptimizerConfig, RunConfig

Treatments = Mapping[tuple[bool, str], Sequence[nn.Parameter]]
"""(weight decay or not, learning-rate group) → segments"""


class FusedOptimizer(Protocol):
    """Steps the parameters it was made with, whose `grad` is set."""

    description: str

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None: ...

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The per-element state of a parameter, by its kind."""
        ...

    def set_steps(self, steps: int) -> None:
        """Set the count of updates, which bias correction uses."""
        ...


class _Fused(ABC):
    """What the implementations share: a torch-style optimizer with one group for each treatment."""

    def __init__(self, treatments: Treatments, moment_names: Sequence[str]):
        self._treatments = list(treatments)
        self._moment_names = moment_names
        # A rank without trainable parameters takes part in every collective all the same; optimizers want a group.
        self._groups: list[dict[str, Any]] = [{"params": list(segments)} for segments in treatments.values()]
        self._groups = self._groups or [{"params": []}]
        self.optimizer: Any = None

    def _adopt(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        for parameter in self._parameters():
            for name in self._moment_names:
                self.optimizer.state[parameter][name] = torch.zeros_like(parameter)
        self.set_steps(0)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group["params"]]

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {name: self.optimizer.state[parameter][name] for name in self._moment_names}

    def _set_rates(self, rates: Mapping[str, float], weight_decay: float) -> None:
        for group, (decays, lr_group) in zip(self.optimizer.param_groups, self._treatments, strict=False):
            group["lr"] = rates[lr_group]
            group["weight_decay"] = weight_decay if decays else 0.0

    def _multiply_gradients(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if factor != 1.0 and gradients:  # a stage of no layers has none
            torch._foreach_mul_(gradients, factor)

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set the count of updates where the implementation keeps it."""


class TorchFused(_Fused):
    """torch.optim.AdamW or SGD with `fused=True`."""

    def __init__(self, config: OptimizerConfig, device: torch.device, wide: torch.dtype, treatments: Treatments):
        super().__init__(treatments, _moment_names(config))
        self._device, self._counts = device, config.optimizer == "adam"
        self._folds = wide != torch.float64
        if config.optimizer == "sgd":
            self._adopt(torch.optim.SGD(self._groups, lr=0.0, momentum=config.sgd_momentum, fused=True))
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self._adopt(torch.optim.AdamW(self._groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True))
        self.description = f"torch {type(self.optimizer).__name__}, fused"

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        """One update with the gradients times `factor`."""
        self._set_rates(rates, weight_decay)
        self.optimizer.grad_scale = None
        if factor != 1.0 and self._folds:
            self.optimizer.grad_scale = torch.tensor(1.0 / factor, device=self._device)
        else:
            self._multiply_gradients(factor)
        self.optimizer.step()

    def set_steps(self, steps: int) -> None:
        """Restore the count."""
        if self._counts:
            for parameter in self._parameters():
                self.optimizer.state[parameter]["step"] = torch.tensor(float(steps), device=parameter.device)


class LibraryAdam(_Fused):
    """FusedAdam of NVIDIA Apex or Transformer Engine: both keep the count of updates in the group."""

    def __init__(self, fused_adam: Any, name: str, config: OptimizerConfig, treatments: Treatments):
        super().__init__(treatments, _moment_names(config))
        self.description = f"{name} FusedAdam"
        self._adopt(fused_adam(self._groups, **fused_adam_options(config)))

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        """One update with the gradients times `factor`."""
        if not self._parameters():
            return  # Apex looks at a group's first parameter
        self._set_rates(rates, weight_decay)
        self._multiply_gradients(factor)
        self.optimizer.step()

    def set_steps(self, steps: int) -> None:
        """Restore the count."""
        for group in self.optimizer.param_groups:
            group["step"] = steps


def fused_adam_options(config: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments of both libraries' FusedAdam, beside the parameters."""
    return {
        "lr": 0.0,
        "bias_correction": True,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "adam_w_mode": True,
        "weight_decay": 0.0,
    }


def _moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum else ()
    return ("exp_avg", "exp_avg_sq")


LIBRARIES = {
    "apex": ("NVIDIA Apex", "apex.optimizers"),
    "te": ("Transformer Engine", "transformer_engine.pytorch.optimizers"),
}
"""--adam-backend → name, module"""


def _import_adam(backend: str) -> Any:
    """A library's FusedAdam. Raises FlagError where it can't be imported; PyPI's `apex` is another project."""
    name, module = LIBRARIES[backend]
    try:
        return importlib.import_module(module).FusedAdam
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # or built for another machine
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FlagError(
            f"--adam-backend {backend}: {name}'s FusedAdam can't be imported ({reason}); use torch, the default"
        ) from None


def check_adam_backend(config: RunConfig, device: str) -> list[str]:
    """What stands against `--adam-backend` on a device of this type."""
    optimizer = config.optimizer
    flag = f"--adam-backend {optimizer.adam_backend}"
    if optimizer.adam_backend == "torch":
        return []
    problems = [
        f"{flag} {why}"
        for holds, why in (
            (optimizer.optimizer != "adam", f"can't be used with --optimizer {optimizer.optimizer}"),
            (device != "cuda", f"needs a GPU, but this run is on {device}"),
            (config.precision.fp64, "can't be used with --fp64: its kernels have no float64"),
            (optimizer.optimizer_cpu_offload, "can't be used with --optimizer-cpu-offload; use --adam-backend torch"),
        )
        if holds
    ]
    if not problems:
        try:
            _import_adam(optimizer.adam_backend)
        except FlagError as error:
            problems.append(str(error))
    return problems


def choose_fused(
    config: OptimizerConfig, device: torch.device, wide: torch.dtype, treatments: Treatments
) -> FusedOptimizer:
    """What `--adam-backend` asks for; the one place that decides."""
    if config.adam_backend == "torch":
        return TorchFused(config, device, wide, treatments)
    return LibraryAdam(_import_adam(config.adam_backend), LIBRARIES[config.adam_backend][0], config, treatments)
