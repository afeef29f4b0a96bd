"""Short runs with any sharding, as functions for the workers of a pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import RunConfig
from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece
from megalite.distributed.pool import ProcessPool
from megalite.training.prepare import prepare_config
from megalite.training.run import build_run
from megalite.verify.configs import resolved
from tests.helpers import set_fields
from tests.verify.networks import FOUR_LAYERS, network

KINDS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
LEAN = {
    "bf16": dict(zip(KINDS, ("bf16", "bf16", "bf16", "bf16"), strict=True)),
    "fp16": dict(zip(KINDS, ("fp32", "fp16", "fp16", "fp16"), strict=True)),
    "fp8": dict(zip(KINDS, ("bf16", "bf16", "fp8", "fp8"), strict=True)),
}
"""Flags of the optimizer's states: none scaled; all scaled; the fewest bits."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Outcome:
    """What a rank saw. `values`: whole logical tensors of parameters and state after the last step (first rank only).
    `bytes_per_step`: sent in the last step. `held`: bytes of parameters, gradients, main parameters and moments, and
    elements of its buckets. `peak_gathered`, `peak_gradients`: elements, of sharded parameters and of temporaries for
    sharded gradients. `bucket_sizes`: elements of the bucket that a parameter is in. `buckets`: of every bucket.
    `updates`: all that the optimizer has taken."""

    losses: list[float]
    norms: list[float]
    values: dict[str, Tensor]
    bytes_per_step: int
    held: dict[str, int]
    peak_gathered: int
    peak_gradients: int
    bucket_sizes: dict[str, int]
    buckets: list[int]
    updates: int


def zero_config(strategy: str, *, microbatches: int = 1, dp: int = 2, **overrides: Any) -> RunConfig:
    """The proof network in fp32, untied; `overrides` are fields of any section. `states`: a key of LEAN."""
    config = network(FOUR_LAYERS, tied=overrides.pop("tied", False), dropout=0.0, llama=overrides.pop("llama", False))
    config.precision.fp64 = overrides.pop("fp64", False)
    if (states := overrides.pop("states", None)) is not None:
        overrides["bf16"] = True
        make_lean(config, states)
    config.training.global_batch_size = microbatches * dp
    config.layout.data_parallel_sharding_strategy = strategy
    return set_fields(config, **overrides)


def make_lean(config: RunConfig, states: str) -> None:
    """Set the flags of LEAN's entry."""
    config.precision.use_precision_aware_optimizer = True
    for name, value in LEAN[states].items():
        setattr(config.precision, name, value)


def assemble_pieces(pieces: list[Piece], mesh: Mesh) -> dict[str, Tensor]:
    """Whole logical tensors on every rank, of pieces that ranks share out. Collective over the world."""
    parts = [
        (piece.name, piece.spec.shape, start, piece.numbers(view).clone())
        for piece in pieces
        for _, start, view in piece.held()
    ]
    result: dict[str, Tensor] = {}
    for name, shape, start, view in (part for mine in all_gather_objects(parts, mesh.world) for part in mine):
        whole = result.setdefault(name, torch.full(shape, math.nan, dtype=view.dtype))
        whole[tuple(slice(a, a + n) for a, n in zip(start, view.shape, strict=True))] = view
    return result


def train(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int) -> Outcome:
    """Load what a resolved configuration names, run some steps, save where it says."""
    size = mesh.world.size
    environment = Environment(mesh.rank, size, mesh.rank, size)
    run = build_run(prepare_config(RunConfig.from_dict(values), environment), mesh)
    records, sent = [], 0
    for _ in range(steps):
        before = run.optimizer.transport.bytes_sent
        records.append(run.trainer.step())
        run.optimizer.finish_gathers()
        sent = run.optimizer.transport.bytes_sent - before
    if run.config.checkpoint.save is not None:
        run.save()
    optimizer = run.optimizer
    pieces = [*optimizer.parameter_pieces().values()]
    pieces += [piece._replace(name=key) for key, piece in optimizer.named_state()]
    whole = assemble_pieces(pieces, mesh)
    run.close()
    buckets = optimizer.buckets
    return Outcome(
        losses=[record.lm_loss for record in records],
        norms=[record.grad_norm for record in records],
        values=whole if mesh.is_first else {},
        bytes_per_step=sent,
        held=optimizer.held_bytes() | {"elements": sum(bucket.size for bucket in buckets)},
        peak_gathered=optimizer.gatherer.peak_elements,
        peak_gradients=optimizer.reducer.peak_elements,
        bucket_sizes={slot.name: bucket.size for bucket in buckets for slot in bucket.slots},
        buckets=[bucket.size for bucket in buckets],
        updates=optimizer.steps,
    )


def run_zero(pool: ProcessPool, config: RunConfig, world_size: int, steps: int = 3) -> list[Outcome]:
    """`train` on every rank of an unresolved configuration."""
    given = resolved(config, world_size)
    layout = Layout.from_config(given.layout, world_size)
    return pool.run(train, world_size, given.to_dict(), steps, layout=layout, timeout=120)


def same(a: Outcome, b: Outcome) -> bool:
    """Losses, norms, parameters, main parameters and moments equal bit by bit."""
    return (
        a.losses == b.losses
        and a.norms == b.norms
        and a.values.keys() == b.values.keys()
        and all(torch.equal(a.values[name], b.values[name]) for name in a.values)
    )
