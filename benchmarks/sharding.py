"""Data parallelism on two processes against PyTorch's: the same model, batches and update, alternating in one run.

| ours | PyTorch's |
|---|---|
| no_shard | DistributedDataParallel |
| optim | DistributedDataParallel with ZeroRedundancyOptimizer |
| optim_grads | fully_shard, parameters kept after the forward |
| optim_grads_params | fully_shard |

Both sides reduce in buckets while the backward runs, and clip. A step has two microbatches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.run import LLAMA, SEQUENCE
from megalite.config.resolve import resolve
from megalite.config.schema import DataConfig, OptimizerConfig, PrecisionConfig, RunConfig, TrainingConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import GPTStage, plain_tokens, units_of
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.sharding import Sharding
from megalite.precision.policy import Precision

VOCABULARY, MICRO_BATCH, MICROBATCHES = 32000, 2, 2
Step = Callable[[list[Tensor]], float]
"""One training step on microbatches of tokens [b, s + 1]; the loss."""


class Loss(nn.Module):
    """The mean loss of a microbatch, in `forward`, where the wrappers want it."""

    def __init__(self, stage: GPTStage):
        super().__init__()
        self.stage = stage

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.stage(tokens[:, :-1], plain_tokens(tokens[:, :-1]))
        return self.stage.loss(hidden, tokens[:, 1:], scale=1 / tokens[:, 1:].numel()).total


def build(mesh: Mesh, bf16: bool) -> tuple[GPTStage, Precision]:
    config = RunConfig(
        model=LLAMA,
        data=DataConfig(seq_length=SEQUENCE),
        training=TrainingConfig(micro_batch_size=MICRO_BATCH, train_iters=1),
        precision=PrecisionConfig(bf16=bf16),
    )
    config = resolve(config, 2)
    precision = Precision.from_config(config.precision)
    assert config.model.num_layers is not None
    place = Build(config.model, mesh, precision)
    stage = GPTStage(place, VOCABULARY, whole_model(config.model.num_layers), choose_backend(config, "cpu"))
    initialize(stage, 1234)
    return stage, precision


def ours(mesh: Mesh, strategy: str) -> Step:
    """One of our stages."""
    stage, precision = build(mesh, bf16=False)
    config = RunConfig()
    config.layout.data_parallel_sharding_strategy = strategy
    config.layout.overlap_grad_reduce = True
    config.layout.overlap_param_gather = strategy != "no_shard"
    if strategy != "optim_grads_params":
        config.layout.ddp_bucket_size = 6_500_000  # 25 MiB, as PyTorch's
    how = Sharding.from_config(config.layout, config.optimizer, 2)
    optimizer = Optimizer(units_of([stage]), mesh, precision, OptimizerConfig(), how)
    loss_of = Loss(stage)

    def step(microbatches: list[Tensor]) -> float:
        optimizer.begin_step(len(microbatches))
        total = torch.zeros(())
        for tokens in microbatches:
            optimizer.forward_begins()
            loss = loss_of(tokens)
            optimizer.backward_begins()
            (loss / (len(microbatches) * mesh.dp.size)).backward()
            optimizer.backward_ended(0)
            total += loss.detach()
        optimizer.reduce_gradients()
        result = optimizer.measure(1.0)
        optimizer.step(result, lr=1e-4, decoupled_lr=1e-4, weight_decay=0.01, loss_scale=1.0)
        return float(total) / len(microbatches)

    return step


def peers(mesh: Mesh, strategy: str) -> Step:
    """PyTorch's counterpart of a stage."""
    stage, _ = build(mesh, bf16=False)
    loss_of: Any = Loss(stage)
    if strategy in ("no_shard", "optim"):
        loss_of = DistributedDataParallel(loss_of, gradient_as_bucket_view=True)
    else:
        device_mesh = init_device_mesh("cpu", (2,))
        keep = {"mesh": device_mesh, "reshard_after_forward": strategy == "optim_grads_params"}
        for layer in stage.decoder.layers.values():
            fully_shard(layer, **keep)
        fully_shard(loss_of, **keep)
    options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True}
    optimizer: Any
    if strategy == "optim":
        optimizer = ZeroRedundancyOptimizer(loss_of.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(loss_of.parameters(), **options)

    def step(microbatches: list[Tensor]) -> float:
        total = torch.zeros(())
        for number, tokens in enumerate(microbatches):
            last = number == len(microbatches) - 1
            wait = isinstance(loss_of, DistributedDataParallel) and not last
            with loss_of.no_sync() if wait else contextlib.nullcontext():
                loss = loss_of(tokens)
                (loss / len(microbatches)).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(loss_of.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / len(microbatches)

    return step


def alternate(mesh: Mesh, strategy: str, rounds: int) -> tuple[list[float], list[float], float]:
    """Seconds of our steps and of PyTorch's, and how far the last losses are apart. The first round warms up."""
    sides = [ours(mesh, strategy), peers(mesh, strategy)]
    times: list[list[float]] = [[], []]
    losses = [0.0, 0.0]
    for number in range(rounds + 1):
        generator = torch.Generator().manual_seed(10 * number + mesh.dp.rank)
        shape = (MICRO_BATCH, SEQUENCE + 1)
        microbatches = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(MICROBATCHES)]
        for side in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            losses[side] = sides[side](microbatches)
            dist.barrier()
            if number:
                times[side].append(time.perf_counter() - begin)
    return times[0], times[1], abs(losses[0] - losses[1]) / losses[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    names = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    tokens = 2 * MICROBATCHES * MICRO_BATCH * SEQUENCE
    print(f"{'':20} {'ours':>7} {'PyTorch':>8}  tokens/s   ratio of the rounds (median, min, max)   losses apart")
    for strategy in args.strategies:
        with ProcessPool(2) as pool:
            results = pool.run(alternate, 2, strategy, args.rounds, layout=Layout(dp=2), timeout=1200)
        mine, theirs, apart = results[0]
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        print(
            f"{strategy:20} {tokens / statistics.median(mine):7.0f} {tokens / statistics.median(theirs):8.0f}"
            f"  {'':10} {statistics.median(ratios):.3f} {min(ratios):.3f} {max(ratios):.3f}  {'':20} {apart:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
