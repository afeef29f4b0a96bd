"""From the first step to the last: when to evaluate, save and stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalite.config.schema import RunConfig
from megalite.distributed.collectives import broadcast_object
from megalite.training.diagnostics import Profiler
from megalite.training.evaluation import Evaluator
from megalite.training.metrics import EvaluationRecord, Sink, StepRecord, evaluated_splits
from megalite.training.report import size
from megalite.training.signals import StopRequests
from megalite.training.task import TASKS
from megalite.training.trainer import Trainer


@dataclass
class Loop:
    """`save` writes a checkpoint of the trainer's present state. `splits`: which of valid and test have data and are
    wanted. `validated` is called with the loss of each evaluation on valid. `peak_memory`: bytes of the largest
    process; collective. `first_step`: taken in place of the trainer's own first one."""

    config: RunConfig
    trainer: Trainer
    evaluator: Evaluator
    total_iterations: int
    splits: list[str]
    sinks: list[Sink]
    stops: StopRequests
    profiler: Profiler
    save: Callable[[], None]
    say: Callable[[str], None]
    validated: Callable[[float], None]
    peak_memory: Callable[[], int]
    first_step: Callable[[], StepRecord] | None = None

    def run(self) -> None:
        """Train to the end or to a reason to stop; then, at the end, evaluate on what there is."""
        try:
            self._run()
        except KeyboardInterrupt:
            places = (self.config.checkpoint.save, self.config.peft.save_best_adapter)
            saved = "nothing was" if places == (None, None) else "what came after the last save wasn't"
            self.say(
                f"interrupted after iteration {self.trainer.state.iteration}: {saved} saved; with --save DIR "
                "--exit-signal-handler Ctrl-C saves"
            )
            raise
        finally:
            self.profiler.close()
            for sink in self.sinks:
                sink.close()

    def _run(self) -> None:
        state, done = self.trainer.state, set[str]()
        if not self.config.validation.skip_train:
            if state.iteration >= self.total_iterations:
                self.say(
                    f"nothing left to train: iteration {state.iteration} is done, and the run ends at "
                    f"{self.total_iterations}; a larger --train-{self._unit()} trains on"
                )
                done = self._evaluated()
            elif self._train():
                return
            else:
                done = {"valid"}
            if state.skipped:
                self.say(f"{state.skipped} of {state.iteration} steps were skipped: gradients or loss weren't finite")
        for split in ("valid", "test"):
            if split not in done:
                self._evaluate(split)

    def _unit(self) -> str:
        """What the run's length was given in."""
        if self.config.finetune.train_epochs is not None:
            return "epochs"
        return "iters" if self.config.training.train_samples is None else "samples"

    def _evaluated(self) -> set[str]:
        """The splits that were evaluated when an earlier run reached this iteration, as far as the metrics file says.
        Collective over the world."""
        path, found = self.config.logging.metrics_file, set[str]()
        if path is not None and self.trainer.mesh.is_first:
            found = evaluated_splits(Path(path), self.trainer.state.iteration)
        found = broadcast_object(found, self.trainer.mesh.world)
        for split in self.splits:
            if split in found:
                self.say(f"{split} isn't evaluated again: {path} already has its loss at this iteration")
        return found

    def _train(self) -> bool:
        """Steps until the end (False) or a reason to stop (True). The last state is always saved, and at the end after
        its evaluation, so that it holds what that found."""
        state, config = self.trainer.state, self.config
        begun, saved, seconds = (state.iteration, state.consumed_tokens), state.iteration, 0.0
        self.trainer.restart_clock()
        while state.iteration < self.total_iterations:
            with self.profiler.step(state.iteration + 1):
                record = self.first_step() if self.first_step is not None else self.trainer.step()
            self.first_step = None
            seconds += record.elapsed_ms / 1e3
            if record.skipped and state.iteration == 1 and self.trainer.scaler.dynamic:
                self.say("the loss scale is being found: skipped steps at the start are normal with --fp16")
            for sink in self.sinks:
                sink.step(record)
            self._report_timers()
            last = state.iteration >= self.total_iterations
            if last or self._due(config.validation.eval_interval):
                self._evaluate("valid")
            if last or self._due(config.checkpoint.save_interval):
                self.save()
                saved = state.iteration
            self.trainer.restart_clock()
            reason = self.stops.reason(state.iteration)
            if reason is not None:
                self._sum_up(*begun, seconds)
                if saved != state.iteration:
                    self.save()
                self.say(f"exiting at iteration {state.iteration}: {reason}")
                return True
        self._sum_up(*begun, seconds)
        return False

    def _sum_up(self, iteration: int, tokens: int, seconds: float) -> None:
        """Tell what was done since `iteration` and `tokens`, and how fast."""
        steps, tokens = self.trainer.state.iteration - iteration, self.trainer.state.consumed_tokens - tokens
        self.say(
            f"trained {steps:,} steps of {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s; peak "
            f"memory per process {size(self.peak_memory())}"
        )

    def _due(self, interval: int | None) -> bool:
        """Whether an event of this interval falls on the present iteration."""
        return interval is not None and self.trainer.state.iteration % interval == 0

    def _evaluate(self, split: str) -> None:
        if split not in self.splits:
            return
        state = self.trainer.state
        loss, scores = self.evaluator.run(split)
        validation, training = self.config.validation, self.config.training
        # One beyond the interval, at the end, isn't counted: a run that goes on later reads as if there were no end.
        if split == "valid" and not validation.full_validation and self._due(validation.eval_interval):
            state.consumed_valid_samples += validation.eval_iters * training.global_batch_size
        of_tokens = TASKS[self.config.finetune.task].of_tokens
        record = EvaluationRecord(state.iteration, split, loss, scores, of_tokens)
        for sink in self.sinks:
            sink.evaluation(record)
        if split == "valid":
            self.validated(loss)

    def _report_timers(self) -> None:
        interval = self.config.logging.log_interval
        if self.trainer.state.iteration % interval == 0:
            line = self.trainer.timers.line(interval)
            if line is not None:
                self.say(line)
