"""Learning rate, weight decay and batch size against megatron-core's classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megalite.config.schema import RunConfig
from megalite.optimizer.schedule import BatchSchedule, Schedule
from tests.helpers import set_fields

COUNTS = [0, 1, 7, 8, 9, 99, 100, 101, 500, 799, 800, 801, 950, 999, 1000, 1001, 5000]


def schedule(**overrides: Any) -> Schedule:
    values: dict[str, Any] = {
        "max_lr": 3e-4,
        "min_lr": 1e-5,
        "style": "cosine",
        "warmup": 0,
        "warmup_init": 0.0,
        "decay": 1000,
        "wsd_style": "exponential",
        "wsd_decay": 200,
        "decoupled_max_lr": None,
        "decoupled_min_lr": 0.0,
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "weight_decay_style": "constant",
        "weight_decay_samples": 1000,
    }
    return Schedule(**{**values, **overrides})


def megatron_values(ours: Schedule, counts: list[int]) -> list[tuple[float, float]]:
    """(learning rate, weight decay) that megatron-core sets for the step after each count of samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=ours.warmup_init,
        max_lr=ours.max_lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.warmup,  # type: ignore[arg-type]
        lr_decay_steps=ours.decay,
        lr_decay_style=ours.style,
        start_wd=ours.start_weight_decay,
        end_wd=ours.end_weight_decay,
        wd_incr_steps=ours.weight_decay_samples,
        wd_incr_style=ours.weight_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=ours.wsd_decay,
        lr_wsd_decay_style=ours.wsd_style,
    )
    values = []
    for before, after in zip([0, *counts], counts, strict=False):
        theirs.step(after - before)
        values.append((group["lr"], group["weight_decay"]))
    return values


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 8, 100.5, 999])
@pytest.mark.parametrize("warmup_init", [0.0, 1e-4])
def test_every_decay_and_warm_up_equals_megatrons(style: str, warmup: float, warmup_init: float) -> None:
    ours = schedule(style=style, warmup=warmup, warmup_init=warmup_init)
    for count, (rate, _) in zip(COUNTS, megatron_values(ours, COUNTS), strict=True):
        assert ours.learning_rate(count) == pytest.approx(rate, rel=1e-12), count


@pytest.mark.parametrize("wsd_style", ["exponential", "linear", "cosine", "minus_sqrt"])
@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("wsd_decay", [1, 200, 1000])
def test_every_last_phase_of_wsd_equals_megatrons(wsd_style: str, warmup: int, wsd_decay: int) -> None:
    ours = schedule(style="WSD", wsd_style=wsd_style, warmup=warmup, wsd_decay=wsd_decay)
    for count, (rate, _) in zip(COUNTS, megatron_values(ours, COUNTS), strict=True):
        assert ours.learning_rate(count) == pytest.approx(rate, rel=1e-12, abs=1e-18), count


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_every_growth_of_weight_decay_equals_megatrons(style: str) -> None:
    start = 0.1 if style == "constant" else 0.01
    ours = schedule(weight_decay_style=style, start_weight_decay=start, weight_decay_samples=700)
    for count, (_, decay) in zip(COUNTS, megatron_values(ours, COUNTS), strict=True):
        assert ours.weight_decay(count) == pytest.approx(decay, rel=1e-12), count


def test_the_embedding_may_have_its_own_rate() -> None:
    ours = schedule(max_lr=1.0, min_lr=0.0, decoupled_max_lr=0.2, decoupled_min_lr=0.1, style="linear")
    assert [ours.learning_rate(n, decoupled=True) for n in (0, 500, 1000)] == pytest.approx([0.2, 0.15, 0.1])
    assert schedule().learning_rate(300, decoupled=True) == schedule().learning_rate(300)


def run_config(**fields: Any) -> RunConfig:
    """`fields` are looked up in the sections of the training, learning rate and optimizer."""
    config = RunConfig()
    config.training.global_batch_size = 16
    config.learning_rate.lr = 1e-3
    return set_fields(config, **fields)


def test_iterations_become_samples_through_the_batch_size_ramp() -> None:
    """8, then 12 from sample 20, then 16 from sample 40: steps begin at 0, 8, 16, 24, 36, 48, 64, ..."""
    config = run_config(rampup_batch_size=[8, 4, 40], train_iters=10, lr_warmup_iters=3, lr_decay_iters=8)
    batches = BatchSchedule.from_config(config)
    assert [batches.at(n) for n in (0, 8, 16, 24, 36, 48)] == [8, 8, 8, 12, 12, 16]
    assert [batches.samples_after(n) for n in range(8)] == [0, 8, 16, 24, 36, 48, 64, 80]
    ours = Schedule.from_config(config, batches)
    assert (ours.warmup, ours.decay, ours.weight_decay_samples) == (24, 96, 128)


def test_wsd_ends_with_the_last_iteration_in_spite_of_a_ramp() -> None:
    config = run_config(
        rampup_batch_size=[8, 4, 40], train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=7, min_lr=1e-5
    )
    batches = BatchSchedule.from_config(config)
    ours = Schedule.from_config(config, batches)
    assert ours.decay == batches.samples_after(10) == 128
    assert ours.decay - ours.wsd_decay == batches.samples_after(3) == 24
    assert ours.learning_rate(24) == 1e-3
    assert ours.learning_rate(36) < 1e-3
    assert ours.learning_rate(128) == pytest.approx(1e-5)


def test_a_run_in_samples_takes_its_lengths_in_samples_and_a_fraction_is_of_the_decay() -> None:
    config = run_config(train_samples=1000, lr_warmup_samples=100, lr_decay_samples=900, lr_decay_style="WSD")
    config.learning_rate.lr_wsd_decay_samples = 300
    ours = Schedule.from_config(config, BatchSchedule.from_config(config))
    assert (ours.warmup, ours.decay, ours.wsd_decay, ours.weight_decay_samples) == (100, 900, 300, 1000)
    config.learning_rate.lr_warmup_fraction = 0.05
    assert Schedule.from_config(config, BatchSchedule.from_config(config)).warmup == pytest.approx(45)


@pytest.mark.parametrize(
    ("final", "start", "increment", "samples"), [(16, 8, 4, 40), (64, 8, 8, 1000), (32, 32, 4, 100), (48, 16, 16, 96)]
)
def test_the_ramp_equals_megatrons_at_every_count(final: int, start: int, increment: int, samples: int) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    config = run_config(global_batch_size=final, rampup_batch_size=[start, increment, samples])
    ours = BatchSchedule.from_config(config)
    if start == final:
        assert {ours.at(n) for n in range(2 * samples)} == {final}
        return
    theirs = RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, start, increment, samples)
    for consumed in range(2 * samples):
        theirs.update(consumed, consistency_check=False)
        assert ours.at(consumed) == theirs.get_current_global_batch_size(), consumed


def test_samples_and_iterations_convert_into_each_other() -> None:
    for fields in ({"rampup_batch_size": [8, 4, 40]}, {}):
        batches = BatchSchedule.from_config(run_config(**fields))
        for iterations in range(20):
            assert batches.iterations_for(batches.samples_after(iterations)) == iterations
