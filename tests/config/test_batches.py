"""The batch size as stages; a ramp-up against Megatron's: `tests/optimizer/test_schedule.py`."""

from __future__ import annotations

import pytest

from megalite.config.batches import batch_size_at, batch_size_stages
from megalite.config.schema import TrainingConfig


@pytest.mark.parametrize("rampup", [None, [8, 8, 100], [2, 2, 0]], ids=["none", "from the end", "over no samples"])
def test_a_batch_that_never_grows_is_constant(rampup: list[int] | None) -> None:
    stages = batch_size_stages(TrainingConfig(global_batch_size=8, rampup_batch_size=rampup), 64)
    assert stages == [(0, 8)]


def test_steps_are_tokens_over_the_sequence_length() -> None:
    entries = ["0:16", "2.4B:320", "12B:1536"]
    stages = batch_size_stages(TrainingConfig(step_batch_size_schedule=entries), 2048)
    assert stages == [(0, 16), (1_171_875, 320), (5_859_375, 1536)]
    assert batch_size_at(stages, 0) == 16
    assert batch_size_at(stages, 1_171_874) == 16
    assert batch_size_at(stages, 1_171_875) == 320
    assert batch_size_at(stages, 10**12) == 1536


def test_a_schedule_may_be_one_word_and_in_any_order() -> None:
    split = batch_size_stages(TrainingConfig(step_batch_size_schedule=["1K:8", "0:4", "2M:16"]), 10)
    assert split == batch_size_stages(TrainingConfig(step_batch_size_schedule=["0:4, 1k:8 2m:16"]), 10)
    assert split == [(0, 4), (100, 8), (200_000, 16)]


@pytest.mark.parametrize(
    "entries, message",
    [
        (["16"], "16 is not TOKENS:SIZE"),
        (["1K:16"], "the first step must be at 0 tokens"),
        (["0:4", "5:8"], "two steps are less than one sequence"),
        (["0:4", "1X:8"], "1X is not a number"),
        (["0:"], "is not a number"),
        (["0:4", "1K:16.9"], "16.9 is not a whole number"),
        (["0:4", "0.0005K:8"], "0.0005K is not a whole number"),
        (["0:4", "inf:8"], "inf is not a finite number"),
        (["0:4", "1K:nan"], "nan is not a finite number"),
        (["0:4", "1e400:8"], "1e400 is too large"),
        (["0:4", "9000000000T:8"], "9000000000T is too large"),
        (["0:4", "-1K:8"], "TOKENS must not be negative"),
        (["0:4", "1K:0"], "SIZE must be at least 1"),
    ],
)
def test_a_bad_schedule_says_what_is_wrong(entries: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_size_stages(TrainingConfig(step_batch_size_schedule=entries), 64)
