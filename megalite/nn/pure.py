"""Arithmetic between matrix products, as functions of tensors that come with the formula of their gradient.

Key idea: such a function has no side effects, no communication and no graph of its own, so it may be compiled as it
stands (`--compile`), whatever the layout; and the formulas keep less for the backward than autograd would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, wanted: bool) -> Function:
    """`function`, by torch.compile where that is wanted: at its first call for each kind of arguments, or from the
    compiler's cache on disk. It must be pure."""
    return cast(Function, torch.compile(function, fullgraph=True)) if wanted else function


def compiler_problems(wanted: bool, device_type: str) -> list[str]:
    """What stands against `--compile`, where that is `wanted`."""
    if not wanted:
        return []
    if device_type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return [] if found else ["--compile needs Triton, which isn't installed: install triton or leave --compile out"]
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(shutil.which(name) for name in names):
        return []
    return [f"--compile needs a C++ compiler, and {' or '.join(names)} isn't there: install one or leave --compile out"]


class Differentiable:
    """`forward(*arguments)` → result and what `backward` needs; `backward(needed, gradient, *those)` → the gradients of
    the first arguments, of which `needed` says which are asked for."""

    def __init__(
        self,
        forward: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., tuple[Tensor | None, ...]],
        wanted: bool,
    ):
        """`wanted`: as in `compiled`."""
        self.forward, self.backward = compiled(forward, wanted), compiled(backward, wanted)

    def __call__(self, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled():
            return cast(Tensor, _Function.apply(self, *arguments))
        return self.forward(*arguments)[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Differentiable, *arguments: Any) -> Tensor:
        result, *kept = pair.forward(*arguments)
        ctx.save_for_backward(*kept)
        ctx.pair, ctx.arguments = pair, len(arguments)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.pair.backward(ctx.needs_input_grad[1:], grads[0], *ctx.saved_tensors)
        return None, *found, *[None] * (ctx.arguments - len(found))
