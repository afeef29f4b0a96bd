"""What data-parallel ranks share out, and the units in which a model uses its parameters (Rajbhandari et al. 2020).

Key idea: the stages of ZeRO differ in what is held whole and what in shards, so each is three yes-or-no answers; the
code asks those, never for a stage's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from megalite.config.schema import LayoutConfig, OptimizerConfig
from megalite.distributed.param_spec import ParamSpec

Member = tuple[str, nn.Parameter, ParamSpec]
"""(global name, parameter, spec)"""


@dataclass(frozen=True)
class Sharding:
    """`state`: main parameters and moments (and their update) are sharded. `gradients`: so are main gradients, which
    are reduced after every microbatch. `parameters`: so are the parameters, gathered unit by unit for their use.

    `bucket_size`: elements in a bucket; None: all of a chunk in one, or with `overlap_reduce` Megatron-LM's choice.
    `offload`: share of the state kept on the host.
    """

    state: bool = False
    gradients: bool = False
    parameters: bool = False
    overlap_reduce: bool = False
    overlap_gather: bool = False
    bucket_size: int | None = None
    offload: float = 0.0

    @classmethod
    def from_config(cls, layout: LayoutConfig, optimizer: OptimizerConfig, ranks: int) -> Sharding:
        """Of a resolved configuration, over `ranks` that hold copies: of the kind of parameters with the most."""
        strategy, size = layout.data_parallel_sharding_strategy, layout.ddp_bucket_size
        is_cut = strategy == "optim_grads" or (layout.overlap_grad_reduce and strategy != "optim_grads_params")
        if size is None and is_cut:
            size = max(40_000_000, 1_000_000 * ranks)
        return cls(
            state=strategy != "no_shard",
            gradients=strategy in ("optim_grads", "optim_grads_params"),
            parameters=strategy == "optim_grads_params",
            overlap_reduce=layout.overlap_grad_reduce,
            overlap_gather=layout.overlap_param_gather,
            bucket_size=size,
            offload=optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
        ).for_group_of(ranks)

    def for_group_of(self, ranks: int) -> Sharding:
        """This, for parameters that so many ranks hold: one alone has nothing to share."""
        return self if ranks > 1 else Sharding(offload=self.offload)


class Unit(NamedTuple):
    """A module that is called as a whole, and the parameters that its forward uses, whoever owns them.

    `when_weight_gradients_done`: calls a function once the weight gradients that its layers have put off are computed.
    `backward_reads`: whether its backward needs the parameters' values (that of an embedding doesn't).
    """

    module: nn.Module
    chunk: int
    members: list[Member]
    when_weight_gradients_done: Callable[[Callable[[], None]], None]
    backward_reads: bool = True
