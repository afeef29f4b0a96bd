"""How evenly experts are loaded: what is counted in a step, and what follows from it after the step.

Key idea: a router counts on its own tokens; once a step all ranks' counts are summed. The bias of the choice and the
shares of the global loss follow from the counts of the whole global batch, so they don't depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ParamSpec, Place, replicated
from megalite.distributed.pieces import Piece, whole
from megalite.nn.moe.figures import SUMS
from megalite.nn.moe.router import Router


class LoadBalance:
    """The routers of a rank, by layer, and what they have to be told. `rate`: how far a bias moves in a step."""

    def __init__(self, routers: Mapping[int, Router], mesh: Mesh, rate: float):
        self.routers, self._mesh, self._rate = routers, mesh, rate
        self._sums: Tensor | None = None

    def begin_step(self) -> None:
        """Before a step's first forward."""
        for router in self.routers.values():
            router.figures.values.zero_()

    def sum_up(self) -> None:
        """After a step's last backward: over all ranks that have tokens. Collective over the ranks of a stage."""
        if self.routers:
            sums = torch.stack([router.figures.values for router in self.routers.values()])
            self._sums = all_reduce(all_reduce(sums, self._mesh.tp), self._mesh.dp_cp)

    @torch.no_grad()
    def end_step(self) -> None:
        """With an update: move biases towards experts with few tokens (Wang et al. 2024), and take the shares. A router
        that isn't trained keeps its bias."""
        if self._sums is None:
            return
        for router, sums in zip(self.routers.values(), self._sums, strict=True):
            counts = sums[: router.experts]
            if router.expert_bias is not None and router.weight.requires_grad:
                router.expert_bias.add_((counts.mean() - counts).sign(), alpha=self._rate)
            if router.load is not None:
                router.load.copy_(counts / counts.sum())

    def state(self) -> Iterator[tuple[str, Piece]]:
        """(`router_load.layer`, piece) of the shares. Writing into them loads them."""
        place = Place(self._mesh.layout, self._mesh.rank)
        for number, router in self.routers.items():
            if router.load is not None:
                shape = tuple(router.load.shape)
                key = f"router_load.{number}"
                yield key, whole(key, router.load, ParamSpec(shape, shape, replicated(shape, place)))

    def figures(self, samples: int) -> dict[str, float]:
        """Of a step of so many samples, by `layer/name`: tokens of the fullest expert over the mean, share of dropped
        choices, auxiliary losses, entropy in nats. Collective over the pipeline."""
        mine: dict[str, float] = {}
        if self._sums is not None:
            for number, row in zip(self.routers, self._sums.tolist(), strict=True):
                counts, (balance, z, entropy, tokens, dropped) = row[: -len(SUMS)], row[-len(SUMS) :]
                chosen = sum(counts)
                values = {
                    "max_over_mean": max(counts) * len(counts) / chosen,
                    "dropped": dropped / chosen,
                    "balance_loss": balance / samples,
                    "z_loss": z / samples,
                    "entropy": entropy / tokens,
                }
                mine |= {f"{number}/{name}": value for name, value in values.items()}
        return {name: value for part in all_gather_objects(mine, self._mesh.pp) for name, value in part.items()}
