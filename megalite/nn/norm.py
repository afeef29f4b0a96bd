"""LayerNorm and RMSNorm (Ba et al. 2016; Zhang and Sennrich 2019), replicated over tensor-parallel ranks.

Torch's kernels take their statistics in float32 when the input is half precision.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.param_spec import NO_DECAY, ONES, ZEROS, ParamSpec, replicated
from megalite.nn.module import Build, ShardedModule


class Norm(ShardedModule):
    """Normalise the last dimension, of width `width`, as the configuration says.

    `partial`: the gradient on each tensor-parallel rank comes from a part of the tokens or heads.
    """

    def __init__(self, build: Build, width: int, *, partial: bool):
        super().__init__()
        self.width, self.wide = width, build.precision.wide
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
        if self.is_rms:
            return F.rms_norm(x, (self.width,), weight, self.epsilon)
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
