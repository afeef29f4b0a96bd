"""What a run computes, as numbers to compare.

Key idea: one process and any layout are the same program with other layout flags, so both are traced by the same
function: losses and gradient norms of some steps, and every trained parameter's whole gradient at the first.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megalite.config.schema import RunConfig
from megalite.distributed import random
from megalite.distributed.launch import Environment
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import ZEROS
from megalite.training.diagnostics import gather_gradients
from megalite.training.prepare import prepare_config
from megalite.training.run import Run, build_run

_STIRRED = 0.05  # deviation of what is added


@dataclass(frozen=True)
class Trace:
    """`gradients`: global name → whole gradient of the mean loss at the first step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


@torch.no_grad()
def stir(run: Run) -> None:
    """Add random numbers, the same in any layout, to an adapter's weights that start from zeros.

    While LoRA's B is zero its A has no gradient, and there would be nothing to compare.
    """
    if run.model.adapter is None:
        return
    for piece in run.optimizer.parameter_pieces().values():
        if piece.spec.init == ZEROS:
            key = random.fold(run.config.training.seed, "proof", piece.name)
            for _, start, view in piece.held():
                numbers = torch.empty_like(view)
                random.fill_normal(numbers, key, _STIRRED, piece.spec.shape, start)
                view.add_(numbers)
    run.optimizer.parameters_loaded(with_state=False)


def _counted(steps: int, bar: bool) -> Iterable[int]:
    if not bar:
        return range(steps)
    tqdm.set_lock(threading.RLock())  # its default is a semaphore, which a worker that is killed would leave behind
    return tqdm(range(steps), unit="step", leave=False, disable=None)  # None: off where stderr is no terminal


def trace(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int, *, bar: bool = False) -> Trace | None:
    """Run `steps` steps of the resolved configuration `values` (`RunConfig.to_dict`) on this rank. The first rank
    returns the trace, the others None. `bar`: the first rank shows one, on a terminal. Collective over the mesh."""
    size = mesh.world.size
    environment = Environment(mesh.rank, size, mesh.rank, size)
    with contextlib.redirect_stdout(io.StringIO()):  # a proof prints one line for many runs
        run = build_run(prepare_config(RunConfig.from_dict(values), environment), mesh)
    stir(run)
    gradients: dict[str, Tensor] = {}

    def keep(loss_scale: float) -> None:
        gradients.update(gather_gradients(run.optimizer, mesh, loss_scale))

    run.trainer.on_first_gradients = keep
    records = [run.trainer.step() for _ in _counted(steps, bar and mesh.is_first)]
    run.close()
    if not mesh.is_first:
        return None
    losses = [record.lm_loss if record.counted_tokens else 0.0 for record in records]  # NaN equals nothing
    return Trace(losses, [record.grad_norm for record in records], gradients)
