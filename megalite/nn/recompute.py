"""Recomputing activations in the backward instead of keeping them (Chen et al. 2016; Korthikanti et al. 2022).

Key idea: dropout is a function of its place, so running a piece again gives the same bits without any generator state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.config.schema import TrainingConfig


@dataclass(frozen=True)
class Recompute:
    """What is recomputed.

    `layers_at_once`: whole layers, in groups of so many (uniform). `first_layers`: whole layers, this many at the start
    of each stage (block). `modules`: parts of every layer (selective): core_attn, mlp, layernorm.
    """

    layers_at_once: int = 0
    first_layers: int = 0
    modules: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: TrainingConfig) -> Recompute:
        """Of a resolved configuration."""
        if config.recompute_granularity == "selective":
            return cls(modules=frozenset(config.recompute_modules or ["core_attn"]))
        if config.recompute_granularity == "full":
            count = config.recompute_num_layers or 1
            return cls(layers_at_once=count) if config.recompute_method == "uniform" else cls(first_layers=count)
        return cls()

    def run(self, module: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """`function(*args)`, recomputed in the backward where `module` is."""
        return rerun(function, *args) if module in self.modules else function(*args)

    def run_normed(self, module: str, block: Callable[..., Tensor], norm: Callable[..., Tensor], *args: Any) -> Tensor:
        """`block(norm(x), ...)` of the arguments `x, ...`, where block is `module`. With `layernorm` neither the norm's
        result is kept nor what it computes on the way: whoever needs them in the backward has them computed again."""

        x, *rest = args
        if "layernorm" not in self.modules or not torch.is_grad_enabled():
            return self.run(module, block, norm(x), *rest)
        if module in self.modules:
            return rerun(lambda x, *rest: block(norm(x), *rest), x, *rest)
        normed = rerun(norm, x)
        with _keeping(partial(norm, x.detach()), instead_of=normed):
            return block(normed, *rest)


def rerun(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)` keeping only its arguments; the backward computes it again.

    On CUDA the generator's state is kept, for kernels whose dropout follows it.
    """
    on_cuda = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
    return cast(Tensor, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=on_cuda))


def _keeping(function: Callable[[], Tensor], *, instead_of: Tensor) -> saved_tensors_hooks:
    """While entered, what the graph would keep `instead_of` for its backward is `function`, which computes it again."""
    place, shape = instead_of.data_ptr(), instead_of.shape

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return function if saved.data_ptr() == place and saved.shape == shape else saved

    @torch.no_grad()
    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)
