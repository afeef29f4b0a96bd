"""What every building block shares: how it is built, its parameters' specs, and what a forward pass is told.

Key idea: a spec lives in the module beside its parameter (`module.param_specs[name]`); the global name is the path of
the parameter in the model, and layers are keyed by their global number, so no name is ever translated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.distributed import random
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec, Place
from megalite.nn.recompute import Recompute
from megalite.nn.weight_gradients import WeightGradients
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class Build:
    """All that a block needs to be built: the resolved network configuration, this rank's mesh, the number formats."""

    config: ModelConfig
    mesh: Mesh
    precision: Precision
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    recompute: Recompute = field(default_factory=Recompute)

    def place(self, stages: tuple[int, ...] | None = None) -> Place:
        """Where this rank's parameters lie."""
        return Place(self.mesh.layout, self.mesh.rank, stages)


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens in generation."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[s, b, heads, d]` of this layer; return all so far."""
        ...


@dataclass(frozen=True)
class SequenceInfo:
    """What a forward pass knows of its tokens besides the activations.

    `position_ids` int64 [b, s], or [1, s] where all sequences count alike. `token_index` int64: which tokens of the
    sequence this rank's activations between blocks are (a part of them with sequence parallelism). `document_ids` int32
    [b, s]: attention stays within equal ids; `document_borders` int32: the same as `cumulative_lengths`, for
    variable-length kernels. `visible` bool [b, 1, s, keys]: which keys a query may see, instead of the causal rule
    (generation). `dropout_keys` int64 [b]: None in evaluation.
    """

    position_ids: Tensor
    token_index: Tensor
    document_ids: Tensor | None = None
    document_borders: Tensor | None = None
    visible: Tensor | None = None
    dropout_keys: Tensor | None = None
    cache: KeyValueCache | None = None


class ShardedModule(nn.Module):
    """A module whose parameters have specs."""

    def __init__(self) -> None:
        super().__init__()
        self.param_specs: dict[str, ParamSpec] = {}

    def add_parameter(self, name: str, spec: ParamSpec, build: Build) -> nn.Parameter:
        """Register an uninitialised parameter of the spec's local shape, in the compute dtype on the mesh's device."""
        parameter = nn.Parameter(torch.empty(spec.local_shape, dtype=build.precision.compute, device=build.mesh.device))
        self.register_parameter(name, parameter)
        self.param_specs[name] = spec
        return parameter


def named_specs(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamSpec]]:
    """(global name, parameter, spec) of every parameter, each once, in a fixed order."""
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        if not isinstance(module, ShardedModule):
            continue
        for name, spec in module.param_specs.items():
            parameter = module.get_parameter(name)
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}" if prefix else name, parameter, spec


def specs_of(stages: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, ParamSpec]]:
    """`named_specs` of several parts of one model, such as a rank's pipeline chunks."""
    for stage in stages:
        yield from named_specs(stage)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter from its spec: a function of seed, global name and global index alone.

    Rows outside every box (vocabulary padding) become zero.
    """
    for name, parameter, spec in named_specs(model):
        parameter.zero_()
        key = random.fold(seed, "init", name)
        for box in spec.boxes:
            target = parameter[box.local_slices]
            if spec.init.kind == "normal":
                random.fill_normal(target, key, spec.init.std, spec.shape, box.global_start)
            else:
                target.fill_(spec.init.value)
