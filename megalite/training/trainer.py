"""The training loop.

Key idea: `Trainer.step` is the whole of training, from data to update, in the order in which it happens; one process
runs the same path as a thousand. Everything it uses is handed in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.errors import UserError
from megalite.data.microbatch import Microbatch
from megalite.distributed import random
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Group, Mesh
from megalite.optimizer.optimizer import StepResult
from megalite.optimizer.schedule import BatchSchedule
from megalite.training.diagnostics import Timers
from megalite.training.engine import Engine
from megalite.training.metrics import StepRecord
from megalite.training.model import TrainedModel
from megalite.training.resume import Progress


class NonFiniteError(UserError):
    """A loss or gradient norm that isn't finite, with `--nan-action stop` or too often in a row."""

    everywhere = True


def _tokens_of(batch: Microbatch, cp: Group) -> int:
    """How many of a batch's tokens, which aren't padding, a context-parallel rank adds to their number."""
    if batch.lengths is None:
        return batch.tokens.numel()
    return int(batch.lengths.clamp(min=1).sum()) if cp.rank == 0 else 0  # they are of whole sequences


def summed_over_ranks(losses: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the world of each rank's sum of losses, where tensor-parallel ranks hold the same one: the first one's
    counts. The others add theirs only where it isn't finite: so all ranks decide alike whether the step is taken."""
    mine = losses.clone() if mesh.tp.rank == 0 else torch.where(losses.isfinite(), 0.0, losses)
    return all_reduce(mine, mesh.world)


@dataclass
class Trainer:
    """All that a step needs. `microbatches`: of this rank, without end. `on_first_gradients`: called once with the loss
    scale, when the first step's gradients are summed and not yet clipped."""

    model: TrainedModel
    engine: Engine
    progress: Progress
    microbatches: Iterator[Microbatch]
    on_first_gradients: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        self.config, self.mesh, self.optimizer = self.model.config, self.model.mesh, self.model.optimizer
        self.timers = Timers(self.config.logging.timing_log_level, self.mesh.device)
        self.batches = BatchSchedule.from_config(self.config)
        self._ended = time.perf_counter()

    def step(self) -> StepRecord:
        """One step: data, forward and backward, reduction, judgement, update. Collective over the world."""
        samples = self.batches.at(self.progress.state.consumed_samples)
        with self.timers.section("batch-generator", 2):
            count = samples // (self.config.training.micro_batch_size * self.mesh.dp.size)
            microbatches = [next(self.microbatches) for _ in range(count)]
        tokens = self._count_tokens(microbatches)
        loss_scale = self.progress.scaler.scale
        normalisers = torch.cat((tokens[:1], tokens[2:]))
        losses = self._forward_backward(microbatches, normalisers, loss_scale, samples)
        with self.timers.section("all-grads-sync"):
            self.optimizer.reduce_gradients()
            self.model.balance.sum_up()
        if self.on_first_gradients is not None:
            self.on_first_gradients(loss_scale)
            self.on_first_gradients = None
        with self.timers.section("grad-norm", 2):
            result = self.optimizer.measure(loss_scale)
        known = torch.cat([tokens[:2], losses]).tolist()  # one transfer; counts are exact in it
        return self._finish(samples, int(known[0]), int(known[1]), known[2:], loss_scale, result)

    def _count_tokens(self, microbatches: list[Microbatch]) -> Tensor:
        """Tokens of the global batch, int64 [2 + depths] on the device: those whose loss counts, over which it is the
        mean; all but padding; and those that count of each depth of multi-token prediction."""
        objective = self.engine.executor.objective
        counted, ahead = objective.normaliser(microbatches), objective.normalisers_ahead(microbatches)
        processed = sum(_tokens_of(batch, self.mesh.cp) for batch in microbatches)
        mine = torch.cat([counted.view(1), torch.tensor([processed]), ahead])
        return all_reduce(self.mesh.upload(mine), self.mesh.dp_cp)

    def _forward_backward(
        self, microbatches: list[Microbatch], counted: Tensor, loss_scale: float, samples: int
    ) -> Tensor:
        """Gradients into the buffers; the mean losses over the `counted` tokens [1 + depths] of the global batch, equal
        on all ranks, still on the device."""
        tokens = counted[0].clamp(min=1).to(torch.float64)
        ahead = self.engine.executor.objective.scales_ahead(counted[1:]) * loss_scale
        with self.timers.section("forward-backward"):
            self.optimizer.begin_step(len(microbatches))
            self.model.scaling.begin_step(loss_scale / tokens)
            self.model.balance.begin_step()
            state = self.progress.state
            key = random.fold(state.dropout_seed, "dropout")
            if self.mesh.device.type == "cuda":
                # Kernels with their own dropout generator are seeded at each step: resuming needs no generator state.
                stream = random.fold(key, state.consumed_samples, self.mesh.rank)
                torch.cuda.manual_seed(int(stream.item()) & (2**63 - 1))
            losses = self.engine.train(
                microbatches,
                scale=loss_scale / tokens,
                sample_scale=loss_scale / samples,
                ahead_scales=ahead,
                dropout_key=key,
            )
        return summed_over_ranks(losses, self.mesh) / counted.clamp(min=1)

    def _finish(
        self, samples: int, counted: int, tokens: int, losses: list[float], loss_scale: float, result: StepResult
    ) -> StepRecord:
        """Update or skip, advance the state, and tell. `losses`: of next tokens, then of those further ahead."""
        loss, *ahead = losses
        state, schedule = self.progress.state, self.progress.schedule
        finite = result.finite and math.isfinite(loss)
        self._refuse(finite, loss, result)
        rate = schedule.learning_rate(state.schedule_samples)
        zeros = self.optimizer.count_zeros() if self.config.logging.log_num_zeros_in_grad else None
        largest = self._largest_norms(loss_scale)
        fp8 = self.model.scaling.statistics() if self.config.logging.log_fp8_stats else None
        load = self.model.balance.figures(samples) if self.config.model.num_experts is not None else None
        if finite:
            self.model.scaling.end_step()
            self.model.balance.end_step()
            with self.timers.section("optimizer"):
                self.optimizer.step(
                    result,
                    lr=rate,
                    decoupled_lr=schedule.learning_rate(state.schedule_samples, decoupled=True),
                    weight_decay=schedule.weight_decay(state.schedule_samples),
                    loss_scale=loss_scale,
                )
            state.schedule_samples += samples
        self.progress.scaler.update(finite)
        state.iteration += 1
        state.consumed_samples += samples
        state.consumed_tokens += tokens
        state.skipped += not finite
        state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
        state.nans += math.isnan(loss)
        now = time.perf_counter()
        elapsed, self._ended = now - self._ended, now
        flops = tokens * self.model.flops_per_token(tokens / samples)
        return StepRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            counted_tokens=counted,
            lm_loss=loss if counted else math.nan,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            loss_scale=loss_scale,
            skipped=not finite,
            global_batch_size=samples,
            elapsed_ms=elapsed * 1e3,
            tokens_per_second=tokens / elapsed,
            tflops_per_device=flops / elapsed / self.mesh.world.size / 1e12,
            params_norm=self.optimizer.parameter_norm() if self.config.logging.log_params_norm else None,
            num_zeros=zeros,
            largest_grad_norms=largest,
            fp8=fp8,
            moe=load,
            mtp_losses=ahead or None,
        )

    def _largest_norms(self, loss_scale: float) -> dict[str, float] | None:
        """The largest gradient norms by parameter, as many as `--log-top-grad-norms` asks for."""
        count = self.config.logging.log_top_grad_norms
        if count == 0:
            return None
        norms = self.optimizer.gradient_norms(loss_scale)
        return dict(sorted(norms.items(), key=lambda item: -item[1])[:count])

    def _refuse(self, finite: bool, loss: float, result: StepResult) -> None:
        """Stop the run where a step can't be taken and skipping it isn't wanted or leads nowhere."""
        if finite:
            return
        training, state = self.config.training, self.progress.state
        number = state.iteration + 1
        what = f"iteration {number}: loss {loss}, gradient norm {result.grad_norm}"
        if training.nan_action == "stop":
            raise NonFiniteError(
                f"{what}; the last good state is the newest checkpoint. Lower --lr, or skip such steps with "
                "--nan-action skip"
            )
        skips = state.skipped_in_a_row + 1
        if skips >= training.max_skips_in_a_row:
            scale = f", with the loss scale at {self.progress.scaler.scale}" if self.config.precision.fp16 else ""
            raise NonFiniteError(
                f"{what}{scale}. All steps since iteration {number - skips + 1} had to be skipped, which reaches "
                f"--max-skips-in-a-row {training.max_skips_in_a_row}: the run doesn't recover. Restart from an "
                "earlier checkpoint (--ckpt-step) with a lower --lr"
            )

    def restart_clock(self) -> None:
        """Leave what happened since the last step (an evaluation, a save) out of the next step's time."""
        self._ended = time.perf_counter()
