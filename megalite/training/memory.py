"""`--log-memory`: what a step holds on each rank, measured, beside the formulas.

Key idea: what stays between steps is counted from the tensors that are there; what a step needs besides (activations
and temporaries) is watched while it runs, by the allocator on a GPU, and on a CPU by looking at every operator's
results.
"""

from __future__ import annotations

import functools
import operator
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
from megalite.estimate.memory import data_parallel_bytes
from megalite.training.metrics import StepRecord
from megalite.training.report import memory_by_domain, size
from megalite.training.trainer import Trainer

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


def measured_step(trainer: Trainer) -> tuple[StepRecord, list[str]]:
    """A step, and lines for the first rank to print of the memory that it took and the bytes that data parallelism
    sent. Collective over the world."""
    model, optimizer, mesh = trainer.model, trainer.optimizer, trainer.mesh
    sent = optimizer.transport.bytes_sent
    with PeakMemory(mesh.device) as memory:
        record = trainer.step()
        optimizer.finish_gathers()
    peak, held = memory.peak, optimizer.held_bytes()
    if mesh.device.type == "cpu":
        # Their storages grow and shrink unseen by operators; on a GPU the allocator has counted them.
        peak += optimizer.gatherer.peak_bytes
    frozen = sum(p.nbytes for stage in model.stages for p in stage.parameters() if not p.requires_grad)
    mine = [held["parameters"] + frozen, held["gradients"], held["main"], held["moments"]]
    everyone = all_gather_objects([*mine, peak, optimizer.transport.bytes_sent - sent], mesh.world)
    head = "rank        parameters  gradients  main parameters    moments  activations, temporaries  sent"
    lines = ["memory after the first step (sent: by data parallelism in that step)", head]
    lines += [_row(f"{rank}", values) for rank, values in enumerate(everyone[:SHOWN_RANKS])]
    if len(everyone) > SHOWN_RANKS:
        lines.append(f"... and {len(everyone) - SHOWN_RANKS} more ranks")
    if held["host"]:
        lines.append(f"on rank 0's host: {size(held['host'])} of main parameters, moments and gradients")
    if model.adapter is None:  # the formulas don't cover a step of an adapter
        lines.append(_row("predicted 0", predicted_step(trainer)))
    return record, lines


def predicted_step(trainer: Trainer) -> list[int]:
    """By the formulas, for this rank: bytes of parameters, main gradients, main parameters, moments and activations,
    and those that data parallelism sends."""
    model, mesh, precision = trainer.model, trainer.mesh, trainer.model.precision
    count = model.config.microbatches_per_step(mesh.dp.size)
    by_domain = memory_by_domain(model.config, model.stages, trainer.engine.schedules.training(count), mesh)
    sent, memory = 0, functools.reduce(operator.add, by_domain.values())
    for domain, part in by_domain.items():
        ranks = mesh.along(domain.data_axes).size
        sharding = trainer.optimizer.sharding.for_group_of(ranks)
        sent += data_parallel_bytes(
            parameters=part.local_parameters,
            ranks=ranks,
            microbatches=count,
            gradient_bytes=precision.reduce.itemsize if precision.wide.itemsize == 4 else precision.wide.itemsize,
            gathered_bytes=part.parameters * (ranks if sharding.parameters else 1),
            sharded=(sharding.state, sharding.gradients, sharding.parameters),
        )
    state = [memory.parameters, memory.main_gradients, memory.main_parameters, memory.moments]
    return [*state, memory.activations, sent]


def _row(name: str, values: list[int]) -> str:
    widths = (10, 9, 15, 9, 24, 9)
    return f"{name:11} " + "  ".join(f"{size(value):>{width}}" for value, width in zip(values, widths, strict=True))
