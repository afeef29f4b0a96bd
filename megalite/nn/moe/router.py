"""Which experts a token is sent to."""

from __future__ import annotations

from torch import Tensor

from megalite.distributed.param_spec import Init, ParamSpec, replicated
from megalite.nn.module import Build, ShardedModule
from megalite.nn.moe.routing import Routing
from megalite.nn.tokens import Tokens


class Router(ShardedModule):
    def __init__(self, build: Build, number: int):
        super().__init__()
        config = build.config
        shape = (config.num_experts, config.hidden_size)
        boxes = replicated(shape, build.place(), partial=build.mesh.layout.sequence_parallel)
        self.weight = self.add_parameter(
            "weight", ParamSpec(shape, shape, boxes, Init(std=config.init_method_std)), build
        )
        self.topk, self.wide = config.moe_router_topk, build.precision.wide

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = (x.flatten(0, 1) @ self.weight.t()).to(self.wide)
        top, experts = logits.topk(self.topk, dim=-1)
        return Routing(experts, top.softmax(dim=-1))
