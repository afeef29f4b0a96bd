"""The optimizer's step on one process against torch's own fused AdamW on one flat tensor of the same size.

Both sides alternate in one run. "norm, clip and step" is all that a training step does between the last gradient and
the next forward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from benchmarks.measure import seconds
from benchmarks.workloads import CPU, Workload
from megalite.config.schema import OptimizerConfig, PrecisionConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, units_of
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize
from megalite.optimizer.optimizer import Optimizer
from megalite.precision.policy import Precision

RATES = {"lr": 1e-4, "decoupled_lr": 1e-4, "weight_decay": 0.01, "loss_scale": 1.0}


TORCH = "torch AdamW, fused, one tensor"


def make(workload: Workload, *, bf16: bool) -> Optimizer:
    """The optimizer of a workload's model, with gradients that are clipped."""
    config = workload.config(PrecisionConfig(bf16=bf16))
    precision = Precision.from_config(config.precision)
    build = Build(config.model, single_process_mesh(), precision)
    span = whole_model(config.model.num_layers)
    stage = GPTStage(build, workload.vocab_size, span, choose_backend(config, "cpu"))
    initialize(stage, 1)
    optimizer = Optimizer(units_of([stage]), build.mesh, precision, OptimizerConfig(clip_grad=1.0))
    optimizer.begin_step(1)
    for bucket in optimizer.buckets:
        bucket.held_grads.normal_()
    return optimizer


def flat_adamw(elements: int) -> Callable[[], object]:
    """A step of torch's fused AdamW on one tensor."""
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    return optimizer.step


def measure(workload: Workload, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side at each repeat; the first two are left out, since they warm up."""
    fp32, bf16 = make(workload, bf16=False), make(workload, bf16=True)
    sides: dict[str, Callable[[], object]] = {
        TORCH: flat_adamw(sum(bucket.size for bucket in fp32.buckets)),
        "step alone, fp32": lambda: fp32.engines[0].step(1.0, {"default": 1e-4, "decoupled": 1e-4}, 0.01),
        "norm, clip and step, fp32": lambda: fp32.step(fp32.measure(1.0), **RATES),
        "norm, clip, step and copy, bf16": lambda: bf16.step(bf16.measure(1.0), **RATES),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 2):
        for name, side in sides.items():
            times[name].append(seconds(side, torch.device("cpu")))
    return {name: own[2:] for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(CPU), default="w1")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    times = measure(CPU[args.workload], args.repeats)
    first = times[TORCH]
    print(f"{args.threads} threads, {args.repeats} alternating repeats")
    print(f"{'':34} {'ms':>8}   of torch's (median, min, max)")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        print(
            f"{name:34} {statistics.median(own) * 1e3:8.1f}   "
            f"{statistics.median(ratios):.3f} {min(ratios):.3f} {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
