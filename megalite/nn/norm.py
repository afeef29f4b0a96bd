"""LayerNorm and RMSNorm (Ba et al. 2016; Zhang and Sennrich 2019), replicated over tensor-parallel ranks.

Torch's kernels take their statistics in float32 when the input is half precision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.param_spec import NO_DECAY, ONES, ZEROS, ParamSpec, replicated
from megalite.nn.module import Build, ShardedModule
from megalite.nn.pure import Differentiable


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, wide: torch.dtype) -> tuple[Tensor, ...]:
    """For a CPU, where torch's is a chain of operators that each keep something."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square()
    scale = (square / x.shape[-1] + epsilon).rsqrt()
    return (x * scale * weight).to(x.dtype), x, weight, scale


def rms_norm_gradient(
    needed: tuple[bool, ...], grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor | None]:
    """With n = x · scale and g the gradient times the weight: scale · (g - n · mean(g · n))."""
    normed, grad, wide_weight = x * scale, grad.to(scale.dtype), weight.to(scale.dtype)
    product = normed * grad
    weight_grad = product.flatten(0, -2).sum(dim=0).to(weight.dtype) if needed[1] else None
    mean = (product @ wide_weight)[..., None] / x.shape[-1]
    return ((grad * wide_weight - normed * mean) * scale).to(x.dtype), weight_grad


class Norm(ShardedModule):
    """Normalise the last dimension, of width `width`, as the configuration says.

    `partial`: the gradient on each tensor-parallel rank comes from a part of the tokens or heads.
    """

    def __init__(self, build: Build, width: int, *, partial: bool):
        super().__init__()
        self.width, self.wide = width, build.precision.wide
        self.rms_norm = Differentiable(rms_norm, rms_norm_gradient, build.compile)
        self.epsilon = build.config.norm_epsilon
        self.is_rms = build.config.normalization == "RMSNorm"
        self.plus_one = build.config.apply_layernorm_1p
        boxes = replicated((width,), build.place(), partial=partial)
        init = ZEROS if self.plus_one else ONES
        self.weight = self.add_parameter("weight", ParamSpec((width,), (width,), boxes, init, NO_DECAY), build)
        spec = ParamSpec((width,), (width,), boxes, ZEROS, NO_DECAY)
        self.bias = None if self.is_rms else self.add_parameter("bias", spec, build)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x` [..., width]."""
        if not self.plus_one:
            return self._norm(x, self.weight, self.bias)
        # A small weight plus one is one in half precision: all of it in the wide dtype.
        bias = None if self.bias is None else self.bias.to(self.wide)
        return self._norm(x.to(self.wide), self.weight.to(self.wide) + 1, bias).to(x.dtype)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_rms and x.is_cuda:
            return F.rms_norm(x, (self.width,), weight, self.epsilon)
        if self.is_rms:
            return self.rms_norm(x, weight, self.epsilon, self.wide)
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
