"""A mixture of experts in place of the MLP (Shazeer et al. 2017; Fedus et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.distributed.param_spec import Init, ParamSpec, replicated
from megalite.nn.mlp import MLP
from megalite.nn.module import Build, ShardedModule
from megalite.nn.moe.dispatch import DISPATCHERS
from megalite.nn.moe.experts import Experts
from megalite.nn.moe.router import Router
from megalite.nn.tokens import Tokens


class SharedExperts(MLP):
    """The experts that every token passes, as one MLP. Its output may be scaled by a learned gate."""

    def __init__(self, build: Build):
        config = build.config
        assert config.moe_shared_expert_intermediate_size is not None
        super().__init__(build, config.moe_shared_expert_intermediate_size)
        shape = (1, config.hidden_size)
        boxes = replicated(shape, build.place(), partial=build.mesh.layout.sequence_parallel)
        spec, gated = ParamSpec(shape, shape, boxes, Init(std=config.init_method_std)), config.moe_shared_expert_gate
        self.gate_weight = self.add_parameter("gate_weight", spec, build) if gated else None

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        y = super().forward(x, tokens)
        return y if self.gate_weight is None else y * torch.sigmoid(x @ self.gate_weight.t())


class MoELayer(ShardedModule):
    """[s, b, h] → [s, b, h], of this rank's tokens. `number`: of the layer, global."""

    def __init__(self, build: Build, number: int):
        super().__init__()
        config = build.config
        assert config.num_experts is not None
        self.router = Router(build, number)
        self.experts = Experts(build)
        self.dispatch = DISPATCHERS[config.moe_token_dispatcher_type](build.mesh, config.num_experts)
        self.shared_experts = None if config.moe_shared_expert_intermediate_size is None else SharedExperts(build)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        routing = self.router(x, tokens)
        y = self.dispatch(x.flatten(0, 1), routing, self.experts).to(x.dtype).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x, tokens)
