"""What a run computes, as numbers to compare.

Key idea: one process and any layout are the same program with other layout flags, so both are traced by the same
function: losses and gradient norms of some steps, and every parameter's whole gradient at the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.mesh import Mesh
from megalite.training.dump import gather_gradients
from megalite.training.prepare import prepare_config
from megalite.training.run import Run


@dataclass(frozen=True)
class Trace:
    """`gradients`: global name → whole gradient of the mean loss at the first step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def trace(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int) -> Trace | None:
    """Run `steps` steps of the resolved configuration `values` (`RunConfig.to_dict`) on this rank. The first rank
    returns the trace, the others None. Collective over the mesh."""
    size = mesh.world.size
    environment = Environment(mesh.rank, size, mesh.rank, size)
    run = Run(prepare_config(RunConfig.from_dict(values), environment), mesh)
    gradients: dict[str, Tensor] = {}

    def keep(loss_scale: float) -> None:
        gradients.update(gather_gradients(run.optimizer, mesh, loss_scale))

    run.trainer.on_first_gradients = keep
    records = [run.trainer.step() for _ in range(steps)]
    run.close()
    if not mesh.is_first:
        return None
    return Trace([record.lm_loss for record in records], [record.grad_norm for record in records], gradients)
