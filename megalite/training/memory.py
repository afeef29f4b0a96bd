"""`--log-memory`: what a step holds on each rank, measured, beside the formulas.

Key idea: what stays between steps is counted from the tensors that are there; what a step needs besides (activations
and temporaries) is watched while it runs, by the allocator on a GPU, and on a CPU by looking at every operator's
results.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Mesh
from megalite.estimate.memory import MemoryEstimate, data_parallel_bytes
from megalite.optimizer.optimizer import Optimizer
from megalite.training.report import size

SHOWN_RANKS = 32


def peak_process_memory(mesh: Mesh) -> int:
    """The most bytes that any rank has held at a time since it started: of its device, or on a CPU of the whole
    process. Collective over the world."""
    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(mesh.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(all_reduce(torch.tensor(peak, device=mesh.device), mesh.world, "max").item())


class PeakMemory:
    """Context: `peak` becomes the most bytes that were allocated inside it at a time, beyond those from before; `live`
    is how many of them are there now."""

    def __init__(self, device: torch.device):
        self.device, self.peak = device, 0
        self._watch = _Watch() if device.type == "cpu" else None
        self._before = 0

    def __enter__(self) -> PeakMemory:
        if self._watch is not None:
            self._watch.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)
            self.peak = self._watch.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before

    @property
    def live(self) -> int:
        if self._watch is not None:
            return self._watch.count()
        return torch.cuda.memory_allocated(self.device) - self._before


class _Watch(TorchDispatchMode):
    """Follows the storages that operators make until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_identity(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _identity(leaf) not in known:
                storage = leaf.untyped_storage()
                self.live[_identity(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.count())
        return result

    def count(self) -> int:
        """Bytes of those that are there."""
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        return sum(count for _, count in self.live.values())


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def memory_report(
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    frozen: int,
    peak: int,
    sent: int,
    predicted: MemoryEstimate | None,
    microbatches: int,
) -> list[str]:
    """Lines for the first rank to print. `frozen`: bytes of parameters that aren't trained; `peak`: of activations and
    temporaries; `sent`: bytes that this rank sent to other data-parallel ranks in the step. `predicted`: None where the
    formulas don't cover the run. Collective over the world."""
    held = optimizer.held_bytes()
    if mesh.device.type == "cpu" and optimizer.gatherer.peak_elements:
        # Their storages grow and shrink unseen by operators; on a GPU the allocator has counted them.
        peak += optimizer.gatherer.peak_elements * optimizer.buckets[0].params.element_size()
    mine = [held["parameters"] + frozen, held["gradients"], held["main"], held["moments"], peak, sent]
    everyone = all_gather_objects(mine, mesh.world)
    head = "rank        parameters  gradients  main parameters    moments  activations, temporaries  sent"
    lines = ["memory after the first step (sent: by data parallelism in that step)", head]
    for rank, values in enumerate(everyone[:SHOWN_RANKS]):
        lines.append(_row(f"{rank}", values))
    if len(everyone) > SHOWN_RANKS:
        lines.append(f"... and {len(everyone) - SHOWN_RANKS} more ranks")
    if held["host"]:
        lines.append(f"on rank 0's host: {size(held['host'])} of main parameters, moments and gradients")
    if predicted is None:
        return lines
    how = optimizer.sharding
    wide = torch.empty((), dtype=optimizer.precision.wide).element_size()
    compute = torch.empty((), dtype=optimizer.precision.compute).element_size()
    expected = data_parallel_bytes(
        parameters=predicted.local_parameters,
        ranks=mesh.dp_cp.size,
        microbatches=microbatches,
        gradient_bytes=torch.empty((), dtype=optimizer.precision.reduce).element_size() if wide == 4 else wide,
        parameter_bytes=compute,
        sharded=(how.state, how.gradients, how.parameters),
    )
    formula = [
        predicted.parameters,
        predicted.main_gradients,
        predicted.main_parameters,
        predicted.moments,
        predicted.activations,
        expected,
    ]
    return [*lines, _row("predicted 0", formula)]


def _row(name: str, values: list[int]) -> str:
    widths = (10, 9, 15, 9, 24, 9)
    return f"{name:11} " + "  ".join(f"{size(value):>{width}}" for value, width in zip(values, widths, strict=True))
