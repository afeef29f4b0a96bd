"""Which number format serves what.

Key idea: code that needs more precision than the activations have asks for the policy's *wide* dtype, which is float32,
or float64 in proof mode. So `--fp64` is a proof of the very code that trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalite.config.schema import PrecisionConfig
from megalite.precision.products import Products
from megalite.precision.states import WIDE, StateNames


@dataclass(frozen=True)
class Precision:
    """`compute`: parameters and activations. `wide`: main gradients, softmax, rotary tables, loss, main parameters.
    `reduce`: gradients while they are summed over data-parallel ranks. `states`: what the optimizer holds them in."""

    compute: torch.dtype
    wide: torch.dtype
    reduce: torch.dtype
    name: str
    states: StateNames = WIDE

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> Precision:
        """The policy of a checked configuration."""
        states = StateNames.from_config(config)
        in_bf16 = config.grad_reduce_in_bf16 or states.main_grads == "bf16"
        reduce = torch.bfloat16 if in_bf16 else torch.float32
        if config.fp64:
            return cls(torch.float64, torch.float64, torch.float64, "fp64", states)
        if config.bf16:
            return cls(torch.bfloat16, torch.float32, reduce, "bf16", states)
        if config.fp16:
            return cls(torch.float16, torch.float32, reduce, "fp16", states)
        return cls(torch.float32, torch.float32, reduce, "fp32", states)

    def products(self) -> Products:
        """The matrix products of one linear layer."""
        return Products()

    @property
    def needs_main_parameters(self) -> bool:
        """Whether the optimizer keeps wide copies of the parameters."""
        return self.compute != self.wide and self.states.main_params == "fp32"

    @property
    def main_gradients(self) -> torch.dtype:
        """Of the buffers to which layers add gradients."""
        return torch.bfloat16 if self.states.main_grads == "bf16" else self.wide
