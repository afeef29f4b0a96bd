"""Which number format serves what.

Key idea: code that needs more precision than the activations have asks for the policy's *wide* dtype, which is float32,
or float64 in proof mode. So `--fp64` is a proof of the very code that trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalite.config.schema import PrecisionConfig
from megalite.distributed.mesh import Mesh
from megalite.precision.formats import E4M3
from megalite.precision.fp8 import Fp8, Fp8Products
from megalite.precision.products import Products, Role
from megalite.precision.states import WIDE, StateNames


@dataclass(frozen=True)
class Precision:
    """`compute`: parameters and activations. `wide`: main gradients, softmax, rotary tables, loss, main parameters.
    `reduce`: gradients while they are summed over data-parallel ranks. `fp8`: how linear layers compute in eight bits;
    None: in the compute dtype, as the output layer, adapters and heads always do. `states`: what the optimizer holds
    them in."""

    compute: torch.dtype
    wide: torch.dtype
    reduce: torch.dtype
    name: str
    fp8: Fp8 | None = None
    states: StateNames = WIDE

    @classmethod
    def from_config(cls, config: PrecisionConfig, fp8: Fp8 | None = None) -> Precision:
        """The policy of a checked configuration. `fp8`: only training computes in eight bits."""
        states = StateNames.from_config(config)
        in_bf16 = config.grad_reduce_in_bf16 or states.main_grads == "bf16"
        reduce = torch.bfloat16 if in_bf16 else torch.float32
        if config.fp64:
            return cls(torch.float64, torch.float64, torch.float64, "fp64", fp8, states)
        if config.bf16:
            return cls(torch.bfloat16, torch.float32, reduce, "bf16", fp8, states)
        if config.fp16:
            return cls(torch.float16, torch.float32, reduce, "fp16", fp8, states)
        return cls(torch.float32, torch.float32, reduce, "fp32", fp8, states)

    def products(self, mesh: Mesh, cut: tuple[Role, ...], *, keeps_input: bool = True) -> Products:
        """The matrix products of one linear layer. The arguments are those of `Fp8Products`."""
        if self.fp8 is None:
            return Products()
        return Fp8Products(self.fp8, self.wide, mesh, cut, keeps_input=keeps_input)

    @property
    def weight(self) -> torch.dtype:
        """Of the weights of linear layers."""
        return E4M3.dtype if self.fp8 is not None and self.fp8.stores else self.compute

    @property
    def needs_main_parameters(self) -> bool:
        """Whether the optimizer keeps wide copies of the parameters."""
        return self.compute != self.wide and self.states.main_params == "fp32"

    @property
    def main_gradients(self) -> torch.dtype:
        """Of the buffers to which layers add gradients."""
        return torch.bfloat16 if self.states.main_grads == "bf16" else self.wide
