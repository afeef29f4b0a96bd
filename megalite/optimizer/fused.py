"""The engines that update long segments by a fused kernel: torch's, NVIDIA Apex's or Transformer Engine's.

Key idea: an engine owns its segments and the state of their elements. Whichever it is, that state is the same tensors,
so a run may be resumed with another one.
Torch's kernel takes unscaling and clipping as a divisor of the gradients; for the others, and in float64 (torch takes
the divisor in float32), the gradients are multiplied first.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.config.errors import FlagError
from megalite.config.schema import OptimizerConfig, RunConfig
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Treatment
from megalite.distributed.pieces import Piece
from megalite.optimizer.lean import LeanAdam
from megalite.optimizer.segments import Segment
from megalite.precision.policy import Precision
from megalite.precision.states import WIDE


class UpdateEngine(Protocol):
    """Steps its segments, and owns the state that it keeps for their elements."""

    segments: Sequence[Segment]
    description: str

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        """One update with the gradients times `factor`. `rates`: learning rate by learning-rate group."""

    def moments(self, segment: Segment) -> dict[str, Tensor]:
        """The per-element state of a segment, by its kind, as it is held."""

    def state(self, segment: Segment, *, to_fill: bool = False) -> Iterator[tuple[str, Piece]]:
        """(kind, piece) of that state. `to_fill`: to be written to; `loaded` takes what was written."""

    def loaded(self, *, with_state: bool) -> None:
        """Main parameters, and `with_state` the pieces to fill, were changed from outside. Collective (world)."""

    def set_steps(self, steps: int) -> None:
        """Set the count of updates, which bias correction uses."""


class _Fused(ABC):
    """What the engines here share: a torch-style optimizer with one group for each treatment. `config` may be of Adam
    or SGD."""

    description: str

    def __init__(self, config: OptimizerConfig, segments: Sequence[Segment], make: Callable[..., Any]):
        """`make`: the optimizer, from its groups."""
        self.segments = segments
        treated: dict[Treatment, list[nn.Parameter]] = {}
        for segment in segments:
            treated.setdefault(segment.treatment, []).append(segment.main)
        self._treatments = list(treated)
        # A rank without trainable parameters takes part in every collective all the same; optimizers want a group.
        self.optimizer = make([{"params": mains} for mains in treated.values()] or [{"params": []}])
        self._kinds = ["exp_avg", "exp_avg_sq"]
        if config.optimizer == "sgd":
            self._kinds = ["momentum_buffer"] if config.sgd_momentum else []
        for main in (segment.main for segment in segments):
            self.optimizer.state[main].update({kind: torch.zeros_like(main) for kind in self._kinds})
        self.set_steps(0)

    def moments(self, segment: Segment) -> dict[str, Tensor]:
        return {kind: self.optimizer.state[segment.main][kind] for kind in self._kinds}

    def state(self, segment: Segment, *, to_fill: bool = False) -> Iterator[tuple[str, Piece]]:
        for kind, flat in self.moments(segment).items():
            yield from ((kind, piece) for piece in segment.pieces(flat))

    def loaded(self, *, with_state: bool) -> None:
        return  # what was written to is the state itself

    def _set_rates(self, rates: Mapping[str, float], weight_decay: float) -> None:
        for group, treatment in zip(self.optimizer.param_groups, self._treatments, strict=False):
            group["lr"] = rates[treatment.lr_group]
            group["weight_decay"] = weight_decay if treatment.decays else 0.0

    def _multiply_gradients(self, factor: float) -> None:
        if factor != 1.0 and self.segments:  # a stage of no layers has none
            torch._foreach_mul_([segment.gradient for segment in self.segments], factor)

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set the count of updates where the implementation keeps it."""


class TorchFused(_Fused):
    """torch.optim.AdamW or SGD with `fused=True`."""

    def __init__(self, config: OptimizerConfig, device: torch.device, wide: torch.dtype, segments: Sequence[Segment]):
        self._device, self._counts, self._folds = device, config.optimizer == "adam", wide != torch.float64
        make: Callable[..., Any] = partial(torch.optim.SGD, momentum=config.sgd_momentum)
        if config.optimizer == "adam":
            betas = (config.adam_beta1, config.adam_beta2)
            make = partial(torch.optim.AdamW, betas=betas, eps=config.adam_eps)
        super().__init__(config, segments, partial(make, lr=0.0, fused=True))
        self.description = f"torch {type(self.optimizer).__name__}, fused"

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        self._set_rates(rates, weight_decay)
        self.optimizer.grad_scale = None
        if factor != 1.0 and self._folds:
            self.optimizer.grad_scale = torch.full((), 1.0 / factor, device=self._device)  # no copy
        else:
            self._multiply_gradients(factor)
        self.optimizer.step()

    def set_steps(self, steps: int) -> None:
        for segment in self.segments if self._counts else ():
            self.optimizer.state[segment.main]["step"] = torch.tensor(float(steps), device=segment.main.device)


class LibraryAdam(_Fused):
    """FusedAdam of NVIDIA Apex or Transformer Engine: both keep the count of updates in the group."""

    def __init__(self, fused_adam: Any, name: str, config: OptimizerConfig, segments: Sequence[Segment]):
        betas, options = (config.adam_beta1, config.adam_beta2), {"bias_correction": True, "adam_w_mode": True}
        make = partial(fused_adam, lr=0.0, betas=betas, eps=config.adam_eps, weight_decay=0.0, **options)
        super().__init__(config, segments, make)
        self.description = f"{name} FusedAdam"

    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        if not self.segments:
            return  # Apex looks at a group's first parameter
        self._set_rates(rates, weight_decay)
        self._multiply_gradients(factor)
        self.optimizer.step()

    def set_steps(self, steps: int) -> None:
        """Restore the count."""
        for group in self.optimizer.param_groups:
            group["step"] = steps


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


def build_engines(
    config: OptimizerConfig,
    precision: Precision,
    mesh: Mesh,
    segments: Sequence[Segment],
    names: Sequence[str] = (),
    seed: int = 0,
) -> list[UpdateEngine]:
    """Engines that have the segments between them, of the kind that the formats of states and `--adam-backend` ask for;
    the one place that decides which updates what. A rank that has nothing to update says what would update it.

    `names`, `seed`: of all logical parameters, and of random rounding. Collective over the world.
    """
    if precision.states != WIDE:
        return [LeanAdam(config, precision, mesh, segments, names, seed)]

    def engine(device: torch.device, mine: Sequence[Segment]) -> UpdateEngine:
        if config.adam_backend == "torch":
            return TorchFused(config, device, precision.wide, mine)
        return LibraryAdam(_import_adam(config.adam_backend), LIBRARIES[config.adam_backend][0], config, mine)

    hosted = [segment for segment in segments if segment.on_host]
    others = [segment for segment in segments if not segment.on_host]
    engines = [engine(mesh.device, others)] if others or not hosted else []
    return engines + ([engine(torch.device("cpu"), hosted)] if hosted else [])
