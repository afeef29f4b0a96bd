"""The products of a linear layer in eight bits.

Key idea: what differs from plain products is the factors. Each is quantised once for every dimension that a product
sums over, which for scales of a whole tensor is once; the products themselves are a back end's (`precision.backends`).
A weight is quantised once for all microbatches of a step.

A factor that a tensor-parallel rank holds only a part of is scaled by the largest magnitude of all parts, so the
numbers don't depend on the layout. Delayed scaling looks at earlier steps instead: its *history* is the one state here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast as cast_to
from typing import get_args

import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.param_spec import ParamSpec, Place, replicated
from megalite.distributed.pieces import Piece, whole
from megalite.precision.backends import Backend, choose
from megalite.precision.formats import E4M3, E5M2, FloatFormat, cast
from megalite.precision.products import Factor, Products, Role
from megalite.precision.scaling import RECIPES, Block, Quantized, Recipe, amax_of, scale_of
from megalite.precision.statistics import Statistics, measures

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Fp8:
    """How linear layers compute in eight bits. `gradients`: the format of output gradients; all else is E4M3. `margin`:
    powers of two that delayed scaling leaves unused. `length`: steps in its history, of which it takes the `largest` or
    the last. `edges`: layers at the start and at the end of the model that stay in the compute dtype. `stores`: weights
    are stored in eight bits, and so gathered. `keeps`: a quantised weight stays for the step's other microbatches.
    `measures`: statistics are kept."""

    recipe: Recipe
    gradients: FloatFormat
    margin: int
    length: int
    largest: bool
    edges: tuple[int, int]
    stores: bool
    keeps: bool
    measures: bool
    backend: Backend
    description: str

    @classmethod
    def from_config(
        cls, config: PrecisionConfig, device: torch.device, *, keeps: bool = True, measures: bool = False
    ) -> Fp8 | None:
        """Of a checked configuration; None without --fp8-format."""
        if config.fp8_format is None:
            return None
        recipe = RECIPES[config.fp8_recipe]
        backend, why = choose(config, device)
        start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
        return cls(
            recipe,
            E5M2 if config.fp8_format == "hybrid" else E4M3,
            config.fp8_margin,
            config.fp8_amax_history_len,
            config.fp8_amax_compute_algo == "max",
            (start, end) if config.first_last_layers_bf16 else (0, 0),
            config.fp8_param_gather,
            keeps,
            measures,
            backend,
            f"FP8: {config.fp8_format}, scaled {config.fp8_recipe}, products by {why}",
        )

    def covers(self, layer: int, layers: int) -> bool:
        """Whether a layer, counted from 0, computes in eight bits."""
        return self.edges[0] <= layer < layers - self.edges[1]


class _QuantizedFactor(Factor):
    """Quantised as needed: so that products sum over its columns, or over its rows."""

    def __init__(self, tensor: Tensor, products: Fp8Products, role: Role):
        super().__init__(tensor)
        self._products, self.role = products, role

    @cached_property
    def over_columns(self) -> Quantized:
        """[rows, columns]"""
        return self._products.quantize(self.role, self.flat)

    @cached_property
    def over_rows(self) -> Quantized:
        """[columns, rows]"""
        block = self._products.block_of(self.role)
        if block is None or block[0] == block[1]:
            return self.over_columns.transposed()
        return self._products.quantize(self.role, self.flat.t().contiguous())


class Fp8Products(Products):
    """Of one layer.

    `cut`: the roles of which tensor-parallel ranks of `mesh` hold different parts; context-parallel ranks always do, of
    inputs and gradients. `history`: wide [roles, steps], amax of earlier steps, the newest first; zeros where there was
    none. `now`: wide [roles], amax of this step so far; a weight's is of its present values, whenever they were
    quantised. `keeps_input`: whether an input is kept for the
    backward in eight bits; else as it is.
    """

    def __init__(
        self,
        fp8: Fp8,
        wide: torch.dtype,
        mesh: Mesh,
        cut: tuple[Role, ...],
        *,
        keeps_input: bool = True,
    ):
        self.fp8, self.wide, self.mesh, self.cut, self._keeps_input = fp8, wide, mesh, cut, keeps_input
        self.history = torch.zeros(len(ROLES), fp8.length, dtype=wide, device=mesh.device)
        self.now = torch.zeros(len(ROLES), dtype=wide, device=mesh.device)
        self.has_history, self._factor = False, torch.ones_like(self.now[0])
        self._weight: _QuantizedFactor | None = None
        self._stored: Tensor | None = None
        self.statistics = Statistics(len(ROLES), self.now) if fp8.measures else None

    def begin_step(self, factor: Tensor) -> None:
        """Forget what was measured of inputs and gradients, as in an evaluation. `factor`: wide [], what the loss is
        multiplied by in this step, so that gradients of one step say how large those of another will be."""
        self.now[0], self.now[2] = 0.0, 0.0
        self._factor = factor
        if self.statistics is not None:
            self.statistics.forget(0, 2)

    def append(self, amax: Tensor) -> None:
        """Take a step's maxima, wide [roles], into the history. Where all was zero, as gradients are of a batch where
        no token counts, what was known stays: such a scale would round the next step's to zero."""
        amax = torch.where(amax > 0.0, amax, self.history[:, 0])
        self.history.copy_(torch.cat([amax[:, None], self.history[:, :-1]], 1))
        self.has_history = True

    def forget_weight(self) -> None:
        """The weight has other values."""
        self._weight, self.now[1] = None, 0.0
        if self.statistics is not None:
            self.statistics.forget(1)

    def store_weight(self, amax: Tensor) -> Tensor:
        """The scale, wide [], of a weight that is stored in eight bits: `amax` is of all its parts."""
        self._stored = self._scale_for("weight", amax, E4M3, ())
        return self._stored

    def format_of(self, role: Role) -> FloatFormat:
        return self.fp8.gradients if role == "gradient" else E4M3

    def block_of(self, role: Role) -> Block | None:
        return self.fp8.recipe.weight_block if role == "weight" else self.fp8.recipe.block

    def quantize(self, role: Role, x: Tensor) -> Quantized:
        """`x` [m, k], for a product that sums over k."""
        target, block, backend = self.format_of(role), self.block_of(role), self.fp8.backend
        if block is not None:
            result = backend.quantize_blocks(x, self.fp8.recipe, target, block, self.wide)
        else:
            result = backend.quantize(x, self._scale(role, amax_of(x, self.wide), target), target)
        self.measure(role, x, result)
        return result

    def measure(self, role: Role, x: Tensor, quantized: Quantized) -> None:
        """Count what became of `x` where statistics are wanted."""
        if self.statistics is not None:
            self.statistics.add(ROLES.index(role), x, quantized, self.format_of(role))

    def _scale(self, role: Role, amax: Tensor, target: FloatFormat) -> Tensor:
        """Of a whole tensor of this amax, wide []."""
        groups = [self.mesh.tp] if role in self.cut else []
        return self._scale_for(role, amax, target, groups if role == "weight" else [*groups, self.mesh.cp])

    def _scale_for(self, role: Role, amax: Tensor, target: FloatFormat, groups: Sequence[Group]) -> Tensor:
        """`groups`: of ranks that hold other parts of the tensor."""
        recipe, number = self.fp8.recipe, ROLES.index(role)
        factor = self._factor if role == "gradient" else torch.ones_like(self._factor)
        if recipe.delayed:
            self.now[number] = torch.maximum(self.now[number], amax / factor)
        if recipe.delayed and self.has_history:
            past = self.history[number]
            known = (past.amax() if self.fp8.largest else past[0]) * factor * 2.0**self.fp8.margin
            return scale_of(known, recipe, target) + 0.0 * amax  # NaN where this tensor holds an infinity
        for group in groups:
            all_reduce(amax, group, "max")
        return scale_of(amax, recipe, target)

    def factor(self, role: Role, tensor: Tensor) -> _QuantizedFactor:
        factor = _QuantizedFactor(tensor, self, role)
        if self.block_of(role) is None:
            _ = factor.over_columns  # now: its collective would wait for a gather that the layer starts next
        return factor

    def keep(self, factor: Factor, part: Tensor) -> tuple[Tensor, ...]:
        """In eight bits where one scale is that of all parts; as bytes, which can be gathered anywhere."""
        assert isinstance(factor, _QuantizedFactor)
        if self.block_of(factor.role) is not None or (factor.role == "input" and not self._keeps_input):
            return (part,)
        whole = factor.over_columns
        data = whole.data
        if part.shape != factor.tensor.shape:
            data = self.fp8.backend.quantize(part.flatten(0, -2), whole.scale, self.format_of(factor.role)).data
        return data.view(part.shape).view(torch.uint8), whole.scale

    def restore(self, role: Role, tensor: Tensor, *rest: Tensor) -> _QuantizedFactor:
        factor = _QuantizedFactor(tensor, self, role)
        if rest:
            data = factor.flat.view(self.format_of(role).dtype)
            factor.over_columns = Quantized(data, rest[0], (data.shape[0], data.shape[1]))
        return factor

    def weight(self, matrix: Tensor) -> _QuantizedFactor:
        if self._weight is not None:
            return self._weight
        factor = _QuantizedFactor(matrix.detach(), self, "weight")
        if self._stored is not None:
            factor.over_columns = Quantized(factor.flat, self._stored.view(1, 1), (matrix.shape[0], matrix.shape[1]))
        if self.fp8.keeps:
            self._weight = factor
        return factor

    def output(self, x: Factor, matrix: Tensor) -> Tensor:
        assert isinstance(x, _QuantizedFactor)
        y = self.fp8.backend.product(x.over_columns, self.weight(matrix).over_columns, x.tensor.dtype)
        # As F.linear does: no view, for adapters add to the output in place.
        return cast_to(Tensor, torch.ops.aten._unsafe_view(y, [*x.tensor.shape[:-1], y.shape[-1]]))

    def add_output(self, total: Tensor, x: Factor, matrix: Tensor) -> None:
        total.add_(self.output(x, matrix))

    def input_gradient(self, grad: Factor, matrix: Tensor) -> Tensor:
        assert isinstance(grad, _QuantizedFactor)
        x_grad = self.fp8.backend.product(grad.over_columns, self.weight(matrix).over_rows, grad.tensor.dtype)
        return x_grad.view(*grad.tensor.shape[:-1], -1)

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        return self._weight_gradient(grad, x, grad.tensor.dtype)

    @torch.no_grad()
    def add_weight_gradient(self, total: Tensor, grad: Factor, x: Factor) -> None:
        total.add_(self._weight_gradient(grad, x, total.dtype))

    def _weight_gradient(self, grad: Factor, x: Factor, dtype: torch.dtype) -> Tensor:
        assert isinstance(grad, _QuantizedFactor) and isinstance(x, _QuantizedFactor)
        return self.fp8.backend.product(grad.over_rows, x.over_rows, dtype)


class Fp8Scaling:
    """The layers of a rank that compute in eight bits, by the global names of their weights, and what they have to be
    told. Every rank of a stage has the same ones."""

    def __init__(self, layers: Mapping[str, Fp8Products], mesh: Mesh):
        self.layers, self._mesh = layers, mesh
        self._measured = {name: products.statistics for name, products in layers.items() if products.statistics}
        self._delayed = [products for products in layers.values() if products.fp8.recipe.delayed]

    def begin_step(self, factor: Tensor) -> None:
        """Before a step's first forward. `factor`: [], what the loss is multiplied by."""
        for products in self.layers.values():
            products.begin_step(factor.to(products.wide))

    def end_step(self) -> None:
        """Before an update: take the step's maxima into the histories. Collective over the ranks of the stage."""
        if self._delayed:
            maxima = self._of_all_ranks([products.now for products in self._delayed])
            for products, amax in zip(self._delayed, maxima, strict=True):
                products.append(amax)

    def _of_all_ranks(self, amaxes: Sequence[Tensor]) -> Tensor:
        """The largest over the ranks of the stage, stacked."""
        return all_reduce(all_reduce(torch.stack(list(amaxes)), self._mesh.tp, "max"), self._mesh.dp_cp, "max")

    def store_weights(self, pieces: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Round pieces of weights: (global name, wide values, elements in eight bits to fill). Collective over the
        ranks of the stage, which share a weight's scale."""
        stored = {name: products for name, products in self.layers.items() if products.fp8.stores}
        if not stored:
            return
        first = next(iter(stored.values())).now
        amaxes = dict.fromkeys(stored, first.new_zeros(()))
        for name, values, _ in pieces:
            amaxes[name] = torch.maximum(amaxes[name], amax_of(values, first.dtype))
        largest = self._of_all_ranks(list(amaxes.values()))
        scales = {name: stored[name].store_weight(amax) for name, amax in zip(stored, largest, strict=True)}
        for name, values, elements in pieces:
            elements.copy_(cast(values / scales[name], E4M3))
            whole_scale = Quantized(elements.view(1, -1), scales[name].view(1, 1), (1, elements.numel()))
            stored[name].measure("weight", values.view(1, -1), whole_scale)

    def statistics(self) -> dict[str, float]:
        """What `measures` gives for the step so far, over all ranks, by `layer/role/measure`; empty where
        they aren't wanted. Collective over the world."""
        mine: dict[str, float] = {}
        if self._measured:
            largest = self._of_all_ranks([each.largest for each in self._measured.values()])
            counts = torch.stack([each.counts for each in self._measured.values()])
            counts = all_reduce(all_reduce(counts, self._mesh.tp), self._mesh.dp_cp)
            for name, *of_layer in zip(self._measured, largest.tolist(), counts.tolist(), strict=True):
                for role, *row in zip(ROLES, *of_layer, strict=True):
                    prefix = f"{name.removesuffix('.weight')}/{role}/"
                    mine |= {prefix + measure: value for measure, value in measures(*row).items()}
        return {key: value for part in all_gather_objects(mine, self._mesh.pp) for key, value in part.items()}

    def parameters_changed(self, names: Collection[str]) -> None:
        """Weights of these names have other values. Delayed scales may change without."""
        for name, products in self.layers.items():
            if name in names or products.fp8.recipe.delayed:
                products.forget_weight()

    def state(self) -> Iterator[tuple[str, Piece]]:
        """(`fp8_amax.parameter name`, piece) of the histories, of constant size. Writing into them, and then calling
        `loaded`, loads them."""
        place = Place(self._mesh.layout, self._mesh.rank)
        for name, products in self.layers.items():
            if products.fp8.recipe.delayed:
                shape = tuple(products.history.shape)
                key = f"fp8_amax.{name}"
                yield key, whole(key, products.history, ParamSpec(shape, shape, replicated(shape, place)))

    def loaded(self) -> None:
        """Histories have other values."""
        for products in self._delayed:
            products.has_history = bool(products.history.any())
