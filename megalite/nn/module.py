"""What every building block shares: how it is built, and its parameters' specs.

Key idea: a spec lives in the module beside its parameter (`module.param_specs[name]`); the global name is the path of
the parameter in the model, and layers are keyed by their global number, so no name is ever translated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megalite.config.schema import ModelConfig
from megalite.distributed import random
from megalite.distributed.layout import DENSE, Domain
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Init, ParamSpec, Place, replicated
from megalite.distributed.pieces import Piece, whole
from megalite.nn.gradients import WeightGradients
from megalite.nn.recompute import Recompute
from megalite.precision.policy import Precision
from megalite.precision.products import Products, Role


@dataclass(frozen=True)
class Build:
    """All that a block needs to be built: the resolved network configuration, this rank's mesh, the number formats.

    `without_values`: parameters have a shape but no memory; whoever shards them gives them some. `compile`: pure
    functions are compiled.
    """

    config: ModelConfig
    mesh: Mesh
    precision: Precision
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    recompute: Recompute = field(default_factory=Recompute)
    without_values: bool = False
    compile: bool = False

    def in_layer(self, number: int) -> Build:
        """This, for a layer, counted from 0: some may be kept out of eight bits."""
        fp8 = self.precision.fp8
        if fp8 is None or fp8.covers(number, self.config.num_layers):
            return self
        return replace(self, precision=replace(self.precision, fp8=None))

    def products(self, cut: tuple[Role, ...]) -> Products:
        """The matrix products of a linear layer, of which ranks hold different parts of the factors in `cut`.

        A whole input is a norm's result. Where that is computed again, it must be found among what is kept.
        """
        keeps_input = "input" in cut or "layernorm" not in self.recompute.modules
        return self.precision.products(self.mesh, cut, keeps_input=keeps_input)

    def place(self, stages: tuple[int, ...] | None = None, domain: Domain = DENSE) -> Place:
        """Where this rank's parameters of a domain lie."""
        return Place(self.mesh.layout, self.mesh.rank, stages, domain)


class ShardedModule(nn.Module):
    """A module whose parameters have specs."""

    def __init__(self) -> None:
        super().__init__()
        self.param_specs: dict[str, ParamSpec] = {}

    def add_parameter(self, name: str, spec: ParamSpec, build: Build, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Register an uninitialised parameter of the spec's local shape, in the compute dtype or another, on the mesh's
        device."""
        dtype = dtype or build.precision.compute
        parameter = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=build.mesh.device))
        if build.without_values:
            parameter.untyped_storage().resize_(0)
        self.register_parameter(name, parameter)
        self.param_specs[name] = spec
        return parameter

    def add_state(self, name: str, shape: tuple[int, ...], init: Init, build: Build) -> nn.Parameter:
        """Register what isn't trained, but changes by a rule after a step: wide, equal on all ranks of the stage, in
        checkpoints as parameters are. `init`: a constant, which it is from now on."""
        spec = ParamSpec(shape, shape, replicated(shape, build.place()), init, keeps_dtype=True)
        values = torch.full(shape, init.value, dtype=build.precision.wide, device=build.mesh.device)
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.param_specs[name] = spec
        return self.get_parameter(name)


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


def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter from its spec: a function of seed, global name and global index alone."""
    initialize_pieces((whole(name, parameter, spec) for name, parameter, spec in named_specs(model)), seed)


@torch.no_grad()
def initialize_pieces(pieces: Iterable[Piece], seed: int) -> None:
    """As `initialize`, for the parts of parameters that a rank holds. Vocabulary padding becomes zero."""
    for piece in pieces:
        piece.flat.zero_()
        key, init = random.fold(seed, "init", piece.name), piece.spec.init
        for _, start, target in piece.held():
            if init.kind == "normal":
                random.fill_normal(target, key, init.std, piece.spec.shape, start)
            elif init.kind == "uniform":
                random.fill_uniform(target, key, init.value, piece.spec.shape, start)
            else:
                target.fill_(init.value)
