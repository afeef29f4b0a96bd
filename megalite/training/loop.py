"""From the first step to the last: when to evaluate, save and stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megalite.config.errors import UserError
from megalite.distributed.collectives import broadcast_object
from megalite.files.remote import place
from megalite.training.diagnostics import Profiler
from megalite.training.evaluation import Continuations, Evaluator, length_multiple
from megalite.training.memory import measured_step, peak_process_memory
from megalite.training.metrics import EvaluationRecord, StepRecord, evaluated_splits, make_sinks
from megalite.training.report import opening_block, say, size
from megalite.training.resume import TrainingState
from megalite.training.run import Run
from megalite.training.signals import StopRequests
from megalite.training.spikes import SpikeError


class Loop:
    """The whole of a built run: steps, evaluations, saves and what is told of them."""

    def __init__(self, run: Run, moved: Callable[[str], object] = lambda _: None):
        """Prints the block that describes the run. `moved`: is told whenever the run moves on, and to what. Collective
        over the world."""
        config, mesh, done = run.config, run.mesh, run.state.iteration
        self.parts, self.trainer, self.moved = run, run.trainer, moved
        self.config, self.mesh, self.say = config, mesh, partial(say, mesh)
        self.total_iterations = total = run.trainer.batches.total_iterations(config)
        self.say(opening_block(run.model, run.datasets, threads=run.prepared.threads, iteration=done, of=total))
        measure = run.prepared.task.decisions(mesh)
        self.evaluator = Evaluator(
            config, mesh, run.engine, run.feed.evaluation, measure, self.say, partial(moved, "evaluating")
        )
        evaluated = ("valid", "test") if config.validation.eval_iters > 0 else ()
        self.splits = [split for split in evaluated if getattr(run.datasets, split) is not None]
        self.sinks = make_sinks(config, total, done) if mesh.is_first else []
        self.stops = StopRequests(config.training, mesh)
        self.profiler = Profiler(config.logging, Path(config.logging.tensorboard_dir or "profile"), mesh.rank)
        self._measures_step = config.logging.log_memory
        self._step_times: list[float] = []  # of the steps since the last report
        self._newest = done if done and _same_place(config.checkpoint.load, config.checkpoint.save) else None
        if not config.training.rollback_on_spike:
            run.progress.spikes.losses = []  # they wouldn't be the last ones when a later run looks at them

    @property
    def state(self) -> TrainingState:
        return self.parts.state

    def run(self) -> None:
        """Train to the end or to a reason to stop; then, at the end, evaluate on what there is."""
        try:
            self._run()
        except KeyboardInterrupt:
            places = (self.config.checkpoint.save, self.config.peft.save_best_adapter)
            saved = "nothing was" if places == (None, None) else "what came after the last save wasn't"
            self.say(
                f"interrupted after iteration {self.state.iteration}: {saved} saved; with --save DIR "
                "--exit-signal-handler Ctrl-C saves"
            )
            raise
        except UserError as error:
            if error.everywhere:  # all ranks stop, so all can wait for what is being written
                self.parts.saver.wait()
            raise
        finally:
            self.profiler.close()
            for sink in self.sinks:
                sink.close()

    def _run(self) -> None:
        state, done = self.state, set[str]()
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
        if path is not None and self.mesh.is_first:
            found = evaluated_splits(place(path), self.state.iteration)
        found = broadcast_object(found, self.mesh.world)
        for split in self.splits:
            if split in found:
                self.say(f"{split} isn't evaluated again: {path} already has its loss at this iteration")
        return found

    def _train(self) -> bool:
        """Steps until the end (False) or a reason to stop (True). The last state is always saved, and at the end after
        its evaluation, so that it holds what that found."""
        state, config = self.state, self.config
        begun, saved, seconds = (state.iteration, state.consumed_tokens), state.iteration, 0.0
        self.trainer.restart_clock()
        while state.iteration < self.total_iterations:
            self.moved(f"step {state.iteration + 1}")
            state.valid_loss = None
            with self.profiler.step(state.iteration + 1):
                record = self._step()
            seconds += record.elapsed_ms / 1e3
            self._step_times.append(record.elapsed_ms)
            if record.skipped and state.iteration == 1 and self.parts.progress.scaler.dynamic:
                self.say("the loss scale is being found: skipped steps at the start are normal with --fp16")
            for sink in self.sinks:
                sink.step(record)
            if self._rolled_back(record):
                state, saved = self.state, self.state.iteration
                continue
            if state.iteration % config.logging.log_interval == 0:
                self.say(*self.trainer.timers.lines(config.logging.log_interval), *self._stragglers())
            last = state.iteration >= self.total_iterations
            self.parts.saver.poll()
            if last or self._due(config.validation.eval_interval):
                self._evaluate("valid")
                self.parts.saver.wait()  # nothing was stepped meanwhile, so little is left to wait for
            if last or self._due(config.checkpoint.save_interval):
                self._save()
                saved = state.iteration
            self.trainer.restart_clock()
            reason = self.stops.reason(state.iteration)
            if reason is not None:
                self._sum_up(*begun, seconds)
                if saved != state.iteration:
                    self._save()
                self.parts.saver.wait()
                self.say(f"exiting at iteration {state.iteration}: {reason}")
                return True
        self._sum_up(*begun, seconds)
        return False

    def _stragglers(self) -> list[str]:
        """What `--log-straggler` asks for, on the steps since the last time. Collective over the world."""
        times, self._step_times = self._step_times, []
        if self.parts.computing is None:
            return []
        count = self.config.logging.straggler_minmax_count
        return [self.parts.computing.report(len(times), sum(times) / len(times), count)]

    def _step(self) -> StepRecord:
        """One of the trainer's; the first one with its memory, where that is asked for."""
        if not self._measures_step:
            return self.trainer.step()
        self._measures_step = False
        record, lines = measured_step(self.trainer)
        self.say(*lines)
        return record

    def _rolled_back(self, record: StepRecord) -> bool:
        """Judge the loss of a step where `--rollback-on-spike` asks for it, and go back where it is a spike. All ranks
        decide alike, since the loss is summed over all of them. Collective over the world."""
        training, history = self.config.training, self.parts.progress.spikes
        if not training.rollback_on_spike or record.skipped or math.isnan(record.lm_loss):
            return False
        limit = history.limit(training.spike_window, training.spike_threshold)
        if limit is None or record.lm_loss <= limit:
            history.add(record.lm_loss, training.spike_window)
            return False
        spike = (
            f"iteration {record.iteration}: lm loss {record.lm_loss:.6g} is above {limit:.6g}, the mean of the last "
            f"{training.spike_window} and {training.spike_threshold:g} deviations"
        )
        if self._newest is None:
            self.say(f"{spike}; this run has saved no checkpoint to go back to")
            return False
        if (done := history.in_a_row(self._newest)) >= training.max_rollbacks_in_a_row:
            raise SpikeError(
                f"{spike}, after {done} rollbacks to iteration {self._newest}, which reaches --max-rollbacks-in-a-row "
                f"{training.max_rollbacks_in_a_row}: other data don't help. Restart from an earlier checkpoint "
                "(--ckpt-step) with a lower --lr, or raise --spike-threshold"
            )
        self.moved("going back to a checkpoint")
        passed = self.parts.roll_back(self._newest, record.lm_loss, limit)
        self.say(
            f"{spike}: back to iteration {self._newest}, past samples {passed.first_sample} to {passed.end_sample - 1}"
        )
        for sink in self.sinks:
            sink.close()
        self.sinks = make_sinks(self.config, self.total_iterations, self._newest) if self.mesh.is_first else []
        self._save()  # so that a run that is killed now doesn't meet the spike again
        self.parts.saver.wait()
        self.trainer.restart_clock()
        return True

    def _sum_up(self, iteration: int, tokens: int, seconds: float) -> None:
        """Tell what was done since `iteration` and `tokens`, and how fast."""
        steps, tokens = self.state.iteration - iteration, self.state.consumed_tokens - tokens
        self.say(
            f"trained {steps:,} steps of {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s; peak "
            f"memory per process {size(peak_process_memory(self.mesh))}"
        )

    def _due(self, interval: int | None) -> bool:
        """Whether an event of this interval falls on the present iteration."""
        return interval is not None and self.state.iteration % interval == 0

    def _save(self) -> None:
        self.moved("saving")
        for sink in self.sinks:
            sink.flush()
        self.parts.save()
        if self.config.checkpoint.save is not None:
            self._newest = self.state.iteration

    def _evaluate(self, split: str) -> None:
        if split not in self.splits:
            return
        state = self.state
        loss, scores = self.evaluator.run(split)
        self.moved("after an evaluation")
        validation, training = self.config.validation, self.config.training
        # One beyond the interval, at the end, isn't counted: a run that goes on later reads as if there were no end.
        if split == "valid" and not validation.full_validation and self._due(validation.eval_interval):
            state.consumed_valid_samples += validation.eval_iters * training.global_batch_size
        record = EvaluationRecord(state.iteration, split, loss, scores, self.parts.prepared.task.of_tokens)
        for sink in self.sinks:
            sink.evaluation(record)
        if split == "valid":
            self.validated(loss)

    def validated(self, loss: float) -> None:
        """Note the loss; keep the best adapter and show what the model writes, where they are asked for. Collective
        over the world."""
        loss, parts = broadcast_object(loss, self.mesh.world), self.parts  # so that all ranks agree
        self.state.valid_loss = loss
        if parts.adapter_saver is not None:
            self.state.best_valid_loss = parts.adapter_saver.save_if_best(loss, self.state.best_valid_loss)
        prompts, tokenizer = parts.prepared.prompts, parts.prepared.tokenizer
        if prompts is not None:
            length = self.config.data.seq_length
            multiple = length_multiple(self.config, self.mesh)
            written = Continuations(self.mesh, parts.engine, tokenizer, prompts, length, multiple).texts()
            self.say(*(f"prompt: {p}\n  model: {answer}" for p, answer in zip(prompts.texts, written, strict=True)))


def _same_place(a: str | None, b: str | None) -> bool:
    """Whether two flags name one folder."""
    return a is not None and b is not None and place(a).resolve() == place(b).resolve()
