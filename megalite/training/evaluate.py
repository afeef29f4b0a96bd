"""Loss on held-out data, summed over all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalite.config.schema import RunConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import forward_only
from megalite.training.executor import GPTExecutor


@dataclass
class Evaluator:
    """Runs forwards without gradients. `whole`: an iterator over a split from its start to its end (for
    `--full-validation`)."""

    config: RunConfig
    mesh: Mesh
    executor: GPTExecutor
    runtime: PipelineRuntime
    whole: Callable[[str], Iterator[Microbatch]]

    def run(self, split: str, microbatches: Iterator[Microbatch]) -> float:
        """Mean loss in nats over the unmasked tokens of `--eval-iters` global batches of `microbatches`, or of the
        whole split. Collective over the world."""
        if self.config.validation.full_validation:
            chosen = self.whole(split)
        else:
            chosen = itertools.islice(microbatches, self.config.validation.eval_iters * self.per_batch)
        # losses and tokens; float64 so that the sum doesn't depend on how the ranks share the samples
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        actions = forward_only(self.mesh.pp.size, 1, 1)[self.mesh.pp.rank]
        for batch in chosen:
            self.executor.begin([batch])
            self.runtime.run(actions)
            sums[0] += self.executor.loss_sum
            sums[1] += batch.loss_mask.sum().to(self.mesh.device)
        loss, tokens = all_reduce(sums, self.mesh.dp_cp).tolist()
        return loss / max(1.0, tokens)

    @property
    def per_batch(self) -> int:
        """Microbatches of this rank in a full global batch."""
        training = self.config.training
        assert training.global_batch_size is not None and training.micro_batch_size is not None
        return training.global_batch_size // (training.micro_batch_size * self.mesh.dp.size)
