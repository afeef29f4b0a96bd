"""Loss on held-out data, summed over all tokens."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalite.config.schema import RunConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.pipeline.runtime import PipelineRuntime
from megalite.training.classification import DecisionCounts
from megalite.training.executor import GPTExecutor
from megalite.training.plan import Plan

PROGRESS_SECONDS = 30.0  # without a line


@dataclass
class Evaluator:
    """Runs forwards without gradients. `data`: this rank's microbatches of a split for one evaluation: of
    `--eval-iters` global batches, or with `--full-validation` of the whole split. `say`: prints a line on
    the first rank."""

    config: RunConfig
    mesh: Mesh
    executor: GPTExecutor
    runtime: PipelineRuntime
    plan: Plan
    data: Callable[[str], Iterator[Microbatch]]
    decisions: DecisionCounts | None = None
    say: Callable[[str], None] = print

    def run(self, split: str) -> tuple[float, dict[str, float]]:
        """Mean loss in nats over the split's unmasked tokens, NaN where there are none; and of a classifier its scores.
        Collective (world)."""
        chosen = self.data(split)
        if self.decisions is not None:
            self.decisions.clear()
        # losses and tokens; float64 so that the sum doesn't depend on how the ranks share the samples
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        validation, begun, done = self.config.validation, time.monotonic(), 0
        told = begun
        while batches := list(itertools.islice(chosen, self.config.microbatches_per_step(self.mesh.dp.size))):
            self.executor.begin(batches)
            self.runtime.run(self.plan.evaluation(len(batches)))
            sums[0] += self.executor.loss_sum
            if self.mesh.pp.rank == self.mesh.pp.size - 1:  # where the losses are
                sums[1] += self.mesh.upload(torch.stack([batch.loss_mask.sum() for batch in batches]).sum())
            done += 1
            if (now := time.monotonic()) - told > PROGRESS_SECONDS:
                most = "" if validation.full_validation else f" of at most {validation.eval_iters}"
                self.say(f"{split}: {done}{most} global batches evaluated in {now - begun:.0f} s")
                told = now
        loss, tokens = all_reduce(sums, self.mesh.all_but_tp).tolist()
        return loss / tokens if tokens else math.nan, {} if self.decisions is None else self.decisions.scores()
