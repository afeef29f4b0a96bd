"""The global batch size as a function of consumed samples: constant, ramped up, or by steps.

All three are one list of stages, [(first sample, batch size), ...]: from `first sample` consumed samples on, a step
takes `batch size` sequences. Nothing here knows iterations, so a resumed run finds its batch size by itself.
"""

from __future__ import annotations

from megalite.config.schema import TrainingConfig
from megalite.config.values import whole_number


def batch_size_stages(training: TrainingConfig, seq_length: int | None) -> list[tuple[int, int]]:
    """The stages of a run. `seq_length` turns the tokens of --step-batch-size-schedule into samples.

    A ValueError says what is wrong with a schedule. Sources: Megatron-LM's batch-size ramp-up (START, INCREMENT and
    SAMPLES: the batch grows by INCREMENT each time that an equal share of SAMPLES is consumed) and step schedule.
    """
    if training.step_batch_size_schedule:
        return _steps(training.step_batch_size_schedule, seq_length)
    last = training.global_batch_size
    if last is None:
        raise ValueError("--global-batch-size is missing")
    if not training.rampup_batch_size:
        return [(0, last)]
    start, increment, samples = training.rampup_batch_size
    growths = (last - start) // increment
    stages = {0: start}
    for k in range(1, growths + 1):
        stages[-(-k * samples // growths)] = start + k * increment  # the ceiling; a later growth at the same place wins
    return sorted(stages.items())


def batch_size_at(stages: list[tuple[int, int]], consumed_samples: int) -> int:
    """The global batch size of the step that begins after `consumed_samples`."""
    return next(size for first, size in reversed(stages) if consumed_samples >= first)


def _steps(entries: list[str], seq_length: int | None) -> list[tuple[int, int]]:
    stages = []
    for entry in " ".join(entries).replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry} is not TOKENS:SIZE")
        tokens, sequences = whole_number(threshold, suffixes=True), whole_number(size, suffixes=True)
        if tokens < 0 or sequences < 1:
            raise ValueError(f"{entry}: TOKENS must not be negative, SIZE must be at least 1")
        stages.append((tokens // (seq_length or 1), sequences))
    stages.sort(key=lambda stage: stage[0])
    if not stages or stages[0][0] != 0:
        raise ValueError("the first step must be at 0 tokens")
    firsts = [first for first, _ in stages]
    if len(set(firsts)) < len(firsts):
        raise ValueError("two steps are less than one sequence (--seq-length tokens) apart")
    return stages
