"""Parameters and main gradients in contiguous buffers.

Key idea: parameters that are treated alike (dtype, weight decay, learning-rate group) lie side by side, each aligned to
128 elements, so the optimizer and the reduction work on a few flat segments. A parameter becomes a view of its buffer;
`parameter.main_grad` is a view of the wide gradient buffer, into which layers accumulate. What reaches autograd's own
`.grad` (norms, biases) is moved there by a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.precision.policy import Precision

ALIGNMENT = 128


@dataclass(frozen=True)
class Slot:
    """One parameter's range of a buffer."""

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the buffer's length, in its local shape."""
        shape = self.spec.local_shape
        return flat[self.start : self.start + prod(shape)].view(shape)


class FlatBuffer:
    """Parameters of one group: flat `params` in the compute dtype, flat wide `grads`, flat wide `main` parameters.

    `main` is `params` itself where the compute dtype is the wide one.
    """

    def __init__(self, members: list[tuple[str, nn.Parameter, ParamSpec]], mesh: Mesh, precision: Precision):
        first = members[0][2]
        self.weight_decay, self.lr_group = first.weight_decay, first.lr_group
        self.mesh, self.precision = mesh, precision
        self.slots: list[Slot] = []
        size = 0
        for name, parameter, spec in members:
            self.slots.append(Slot(name, parameter, spec, size))
            size += -(-prod(spec.local_shape) // ALIGNMENT) * ALIGNMENT
        device = mesh.device
        self.params = torch.zeros(size, dtype=precision.compute, device=device)
        self.grads = torch.zeros(size, dtype=precision.wide, device=device)
        for slot in self.slots:
            self._adopt(slot)
        self.main = self.params
        if precision.needs_main_parameters:
            self.main = self.params.to(precision.wide)

    def _adopt(self, slot: Slot) -> None:
        """Make the parameter a view of the buffer and send its gradients to `main_grad`."""
        view = slot.view(self.params)
        view.copy_(slot.parameter.detach())
        slot.parameter.data = view
        main_grad = slot.view(self.grads)
        slot.parameter.main_grad = main_grad  # type: ignore[attr-defined]

        def move(parameter: Tensor) -> None:
            if parameter.grad is not None:  # None where the layer accumulated into main_grad itself
                main_grad.add_(parameter.grad)
                parameter.grad = None

        slot.parameter.register_post_accumulate_grad_hook(move)

    def reduce(self) -> None:
        """Sum the gradients over all ranks that hold the same parameters, in the policy's reduction dtype."""
        group = self.mesh.dp_cp
        if group.size == 1:
            return
        if self.precision.reduce == self.grads.dtype:
            all_reduce(self.grads, group)
        else:
            self.grads.copy_(all_reduce(self.grads.to(self.precision.reduce), group))

    def refresh_main(self) -> None:
        """Take the main parameters from the parameters (after weights were loaded)."""
        if self.main is not self.params:
            self.main.copy_(self.params)

    def publish(self) -> None:
        """Round the main parameters into the parameters (after an update)."""
        if self.main is not self.params:
            self.params.copy_(self.main)


def build_buffers(
    members: Iterable[tuple[str, nn.Parameter, ParamSpec]], mesh: Mesh, precision: Precision
) -> list[FlatBuffer]:
    """One buffer for each way of being treated, over all parameters that require a gradient, in a fixed order."""
    groups: dict[tuple[bool, str], list[tuple[str, nn.Parameter, ParamSpec]]] = {}
    for name, parameter, spec in members:
        if parameter.requires_grad:
            groups.setdefault((spec.weight_decay, spec.lr_group), []).append((name, parameter, spec))
    return [FlatBuffer(group, mesh, precision) for _, group in sorted(groups.items(), reverse=True)]
