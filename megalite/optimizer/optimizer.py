"""Reduce, judge, clip, update.

Key idea: all of torch's fused Adam (or SGD) runs on a few flat tensors, the segments of the buffers, so one step is one
kernel a segment whatever the number of parameters. Whether a step is taken is decided from one global number that every
rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.schema import OptimizerConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.optimizer.buffers import build_buffers
from megalite.optimizer.copies import CopySums
from megalite.optimizer.gradient_norm import combine, global_names, squares_by_name
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class StepResult:
    """`grad_norm`: of the unscaled gradients, before clipping. `finite`: whether it, and so every gradient, is."""

    grad_norm: float
    finite: bool


class Optimizer:
    """The optimizer of one rank's parameters.

    `members`: (global name, parameter, spec) of the model. Layers accumulate into `parameter.main_grad` from here on.
    """

    def __init__(
        self,
        members: Iterable[tuple[str, nn.Parameter, ParamSpec]],
        mesh: Mesh,
        precision: Precision,
        config: OptimizerConfig,
    ):
        self.config, self.mesh, self.precision = config, mesh, precision
        self.buffers = build_buffers(members, mesh, precision)
        self.names = global_names(self.buffers, mesh)
        self.copies = CopySums(self.buffers, mesh)
        self._flat = [nn.Parameter(buffer.main, requires_grad=False) for buffer in self.buffers]
        for flat, buffer in zip(self._flat, self.buffers, strict=True):
            flat.grad = buffer.grads
        self.torch_optimizer = self._make_torch_optimizer()
        self._create_state()

    def _make_torch_optimizer(self) -> torch.optim.Optimizer:
        # A rank without trainable parameters still takes part in every collective; torch wants a group all the same.
        groups: list[dict[str, Any]] = [{"params": [flat]} for flat in self._flat] or [{"params": []}]
        config = self.config
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)

    def _create_state(self) -> None:
        """All state from the start, so that a checkpoint before the first step holds and loads the same tensors."""
        for flat in self._flat:
            state = self.torch_optimizer.state[flat]
            for key in self.moment_names():
                state[key] = torch.zeros_like(flat)
        self.set_steps(0)

    @property
    def description(self) -> str:
        """Which implementation runs, for the block before step one."""
        return f"torch {type(self.torch_optimizer).__name__}, fused, {len(self.buffers)} flat segments"

    def zero_grad(self) -> None:
        """Clear the main gradients before a step's first backward."""
        for buffer in self.buffers:
            buffer.grads.zero_()

    def reduce_gradients(self) -> None:
        """Sum gradients over partial copies, then over the ranks that hold the same parameters. Collective."""
        self.copies.reduce()
        for buffer in self.buffers:
            buffer.reduce()

    def gradient_norms(self, scale: float) -> dict[str, float]:
        """Norm of every logical parameter's gradient divided by `scale`. Collective over one replica."""
        squares = squares_by_name(self.buffers, self.names, self.mesh)
        return {name: math.sqrt(value) / scale for name, value in zip(self.names, squares, strict=True)}

    def parameter_norm(self) -> float:
        """Norm of all logical parameters. Collective over one replica."""
        return combine(squares_by_name(self.buffers, self.names, self.mesh, of="main"))

    def count_zeros(self) -> int:
        """Elements of all logical gradients that are exactly zero. Collective over one replica."""
        zeros = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for buffer in self.buffers:
            for slot in buffer.slots:
                view = slot.view(buffer.grads)
                for box in slot.spec.boxes:
                    if box.owner == self.mesh.rank:
                        zeros += (view[box.local_slices] == 0).sum()
        return int(all_reduce(zeros, self.mesh.model).item())

    def measure(self, loss_scale: float) -> StepResult:
        """The norm of the reduced gradients. Collective over one replica, equal on all ranks.

        Outside float64 it is rounded once to float32; that value is logged and used to clip.
        """
        norm = combine(squares_by_name(self.buffers, self.names, self.mesh)) / loss_scale
        if self.precision.wide != torch.float64:
            norm = torch.tensor(norm, dtype=self.precision.wide).item()
        return StepResult(norm, math.isfinite(norm))

    @torch.no_grad()
    def step(
        self, result: StepResult, *, lr: float, decoupled_lr: float, weight_decay: float, loss_scale: float
    ) -> None:
        """Unscale, clip to `--clip-grad`, update, and round into the parameters. Gradients must be finite."""
        factor = 1.0 / loss_scale
        limit = self.config.clip_grad
        if limit > 0.0:
            factor *= min(1.0, limit / (result.grad_norm + 1e-6))
        for group, buffer in zip(self.torch_optimizer.param_groups, self.buffers, strict=bool(self.buffers)):
            group["lr"] = decoupled_lr if buffer.lr_group == "decoupled" else lr
            group["weight_decay"] = weight_decay if buffer.weight_decay else 0.0
            if factor != 1.0:
                buffer.grads.mul_(factor)
        self.torch_optimizer.step()
        for buffer in self.buffers:
            buffer.publish()

    def refresh_main(self) -> None:
        """Call after the model's parameters were changed from outside (weights-only load)."""
        for buffer in self.buffers:
            buffer.refresh_main()

    def moment_names(self) -> tuple[str, ...]:
        """Keys of the per-element state."""
        if self.config.optimizer == "sgd":
            return ("momentum_buffer",) if self.config.sgd_momentum else ()
        return ("exp_avg", "exp_avg_sq")

    def named_state(self) -> Iterator[tuple[str, Tensor, ParamSpec]]:
        """(`kind.parameter name`, tensor in the parameter's local shape, spec) of all that a checkpoint needs besides
        the parameters. Writing into the tensors loads them."""
        for flat_parameter, buffer in zip(self._flat, self.buffers, strict=True):
            kinds = {key: self.torch_optimizer.state[flat_parameter][key] for key in self.moment_names()}
            if buffer.main is not buffer.params:
                kinds["main"] = buffer.main
            for kind, flat in kinds.items():
                for slot in buffer.slots:
                    yield f"{kind}.{slot.name}", slot.view(flat), slot.spec

    @property
    def steps(self) -> int:
        """Updates taken: Adam's bias correction counts them."""
        if self.config.optimizer == "sgd" or not self._flat:
            return 0
        return int(self.torch_optimizer.state[self._flat[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Restore the count of updates."""
        if self.config.optimizer == "adam":
            for flat in self._flat:
                self.torch_optimizer.state[flat]["step"] = torch.tensor(float(steps), device=flat.device)
