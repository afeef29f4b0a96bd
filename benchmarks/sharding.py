"""Data parallelism on two processes against PyTorch's: the same model, batches and update, alternating in one run.

| ours | PyTorch's |
|---|---|
| no_shard | DistributedDataParallel |
| optim | DistributedDataParallel with ZeroRedundancyOptimizer |
| optim_grads | fully_shard, parameters kept after the forward |
| optim_grads_params | fully_shard |

Both sides reduce in buckets while the backward runs, and clip. A step has two microbatches. PyTorch's are on our
modules, or with --plain on the plain Llama of `benchmarks.plain`, which alone computes in bf16 from fp32 parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import first_weights
from benchmarks.plain import Llama
from benchmarks.workloads import CPU, TINY_CPU, Workload
from megalite.config.schema import OptimizerConfig, PrecisionConfig, RunConfig
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

WORKLOAD, MICROBATCHES = replace(CPU["w1l"], micro_batch=2), 2
Step = Callable[[list[Tensor]], float]
"""One training step on microbatches of tokens [b, s + 1]; the loss."""


class Loss(nn.Module):
    """The mean loss of a microbatch times `share`, in `forward`, where the wrappers want it. Scaled there, since ours
    forms gradients in the forward."""

    def __init__(self, module: GPTStage | Llama, share: float):
        super().__init__()
        self.module, self.share = module, share

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.module, Llama):
            loss: Tensor = self.module(tokens) * self.share
            return loss
        hidden = self.module(tokens[:, :-1], plain_tokens(tokens[:, :-1]))
        return self.module.loss(hidden, tokens[:, 1:], scale=self.share / tokens[:, 1:].numel()).total


def tiny_workload() -> Workload:
    """To try the whole path."""
    return TINY_CPU["w1l"]


def tokens_of(workload: Workload) -> int:
    """Of a step of both processes."""
    return 2 * MICROBATCHES * workload.tokens


def build(mesh: Mesh, workload: Workload, bf16: bool) -> tuple[GPTStage, Precision]:
    config = workload.config(PrecisionConfig(bf16=bf16), 2)
    precision = Precision.from_config(config.precision)
    place = Build(config.model, mesh, precision)
    span = whole_model(config.model.num_layers)
    stage = GPTStage(place, workload.vocab_size, span, choose_backend(config, "cpu"))
    initialize(stage, 1234)
    return stage, precision


def ours(mesh: Mesh, strategy: str, workload: Workload, bf16: bool) -> Step:
    """One of our stages."""
    stage, precision = build(mesh, workload, bf16)
    config = RunConfig()
    config.layout.data_parallel_sharding_strategy = strategy
    config.layout.overlap_grad_reduce = True
    config.layout.overlap_param_gather = strategy != "no_shard"
    if strategy != "optim_grads_params":
        config.layout.ddp_bucket_size = 6_500_000  # 25 MiB, as PyTorch's
    how = Sharding.from_config(config.layout, config.optimizer, 2)
    optimizer = Optimizer(units_of([stage]), mesh, precision, OptimizerConfig(), how)
    loss_of = Loss(stage, 1 / (MICROBATCHES * mesh.dp.size))

    def step(microbatches: list[Tensor]) -> float:
        optimizer.begin_step(len(microbatches))
        total = torch.zeros(())
        for tokens in microbatches:
            optimizer.forward_begins()
            loss = loss_of(tokens)
            optimizer.backward_begins()
            loss.backward()
            optimizer.backward_ended(0)
            total += loss.detach()
        optimizer.reduce_gradients()
        result = optimizer.measure(1.0)
        optimizer.step(result, lr=1e-4, decoupled_lr=1e-4, weight_decay=0.01, loss_scale=1.0)
        return float(total) * mesh.dp.size

    return step


def wrapped(mesh: Mesh, strategy: str, workload: Workload, bf16: bool, plain: bool) -> nn.Module:
    """Tokens to their loss, in PyTorch's wrapper."""
    module: Any
    if plain:
        module = Llama(workload.config(PrecisionConfig()).model, workload.vocab_size, workload.sequence)
        module.load_state_dict(first_weights(workload, mesh.device)[1])
        layers = module.model.layers
    else:
        module, _ = build(mesh, workload, bf16=False)
        layers = module.decoder.layers.values()
    module = Loss(module, 1 / MICROBATCHES)
    if strategy in ("no_shard", "optim"):
        return DistributedDataParallel(module, gradient_as_bucket_view=True)
    keep: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    keep["reshard_after_forward"] = strategy == "optim_grads_params"
    if bf16:
        keep["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers:
        fully_shard(layer, **keep)
    fully_shard(module, **keep)
    return module


def peers(mesh: Mesh, strategy: str, workload: Workload, bf16: bool, plain: bool) -> Step:
    """PyTorch's counterpart of a stage."""
    loss_of: Any = wrapped(mesh, strategy, workload, bf16, plain)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16 and isinstance(loss_of, DistributedDataParallel))
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
                with autocast:
                    loss = loss_of(tokens)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(loss_of.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


class Measured(NamedTuple):
    """Seconds of the steps of both sides, and the largest difference of their losses, relative."""

    ours: list[float]
    theirs: list[float]
    apart: float


def alternate(mesh: Mesh, strategy: str, rounds: int, workload: Workload, bf16: bool, plain: bool) -> Measured:
    """A step of each side in turns. The first round warms up."""
    sides = [ours(mesh, strategy, workload, bf16), peers(mesh, strategy, workload, bf16, plain)]
    times: list[list[float]] = [[], []]
    losses, apart = [0.0, 0.0], 0.0
    for number in range(rounds + 1):
        microbatches = workload.batches(10 * number + mesh.dp.rank, MICROBATCHES)
        for side in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            losses[side] = sides[side](microbatches)
            dist.barrier()
            if number:
                times[side].append(time.perf_counter() - begin)
        apart = max(apart, abs(losses[0] - losses[1]) / losses[1])
    return Measured(*times, apart)


def measure(
    strategies: Iterable[str], rounds: int, workload: Workload, *, bf16: bool, plain: bool
) -> Iterator[tuple[str, Measured]]:
    """Each strategy, on two processes of one thread."""
    with ProcessPool(2, preload=["benchmarks.sharding"]) as pool:
        for strategy in strategies:
            arguments = strategy, rounds, workload, bf16, plain
            yield strategy, pool.run(alternate, 2, *arguments, layout=Layout(dp=2), timeout=1200)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    names = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    parser.add_argument("--plain", action="store_true", help="PyTorch's on the plain Llama of benchmarks/plain.py")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    if args.bf16 and not args.plain:
        parser.error("--bf16 needs --plain: our modules can't compute under autocast")
    print(f"{'':20} {'ours':>7} {'PyTorch':>8}  tokens/s   ratio of the rounds (median, min, max)   losses apart")
    tokens = tokens_of(WORKLOAD)
    measured = measure(args.strategies, args.rounds, WORKLOAD, bf16=args.bf16, plain=args.plain)
    for strategy, (mine, theirs, apart) in measured:
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        print(
            f"{strategy:20} {tokens / statistics.median(mine):7.0f} {tokens / statistics.median(theirs):8.0f}"
            f"  {'':10} {statistics.median(ratios):.3f} {min(ratios):.3f} {max(ratios):.3f}  {'':20} {apart:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
