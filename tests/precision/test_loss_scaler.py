"""The loss scale against megatron-core's scaler and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalite.config.schema import PrecisionConfig
from megalite.precision.loss_scaler import LossScaler


@pytest.fixture
def megatron_scaler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes megatron-core's dynamic scaler, which puts its numbers on a GPU, on the CPU."""
    from megatron.core.optimizer import grad_scaler

    real = torch.tensor

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **{**kwargs, "device": "cpu"})

    monkeypatch.setattr(grad_scaler.torch, "tensor", on_cpu)
    return grad_scaler.DynamicGradScaler


@pytest.mark.parametrize("failing", [0.02, 0.3, 0.8])
@pytest.mark.parametrize(("window", "hysteresis"), [(2, 1), (5, 2), (20, 3)])
def test_the_scale_follows_megatrons_on_random_sequences(
    megatron_scaler: Callable[..., Any], failing: float, window: int, hysteresis: int
) -> None:
    config = PrecisionConfig(
        fp16=True, initial_loss_scale=2.0**16, min_loss_scale=0.5, loss_scale_window=window, hysteresis=hysteresis
    )
    ours = LossScaler.from_config(config)
    theirs = megatron_scaler(2.0**16, 0.5, 2.0, 0.5, window, hysteresis)
    draw = random.Random(window)
    for _ in range(120):
        finite = draw.random() > failing
        ours.update(finite)
        theirs.update(not finite)
        assert ours.scale == theirs.scale.item()


def test_a_resumed_scaler_continues_as_if_never_stopped() -> None:
    config = PrecisionConfig(fp16=True, loss_scale_window=7)
    straight, first = LossScaler.from_config(config), LossScaler.from_config(config)
    draw = random.Random(0)
    sequence = [draw.random() > 0.2 for _ in range(200)]
    for finite in sequence[:90]:
        straight.update(finite)
        first.update(finite)
    second = LossScaler.from_config(config)
    second.load_state(first.state())
    for finite in sequence[90:]:
        straight.update(finite)
        second.update(finite)
    assert second == straight


def test_a_fixed_scale_and_no_scale_never_change() -> None:
    for config, scale in [(PrecisionConfig(fp16=True, loss_scale=128.0), 128.0), (PrecisionConfig(bf16=True), 1.0)]:
        scaler = LossScaler.from_config(config)
        for finite in (False, False, True, False):
            scaler.update(finite)
        assert scaler.scale == scale


def test_a_checkpoints_dynamic_state_does_not_replace_a_fixed_scale() -> None:
    dynamic = LossScaler.from_config(PrecisionConfig(fp16=True))
    fixed = LossScaler.from_config(PrecisionConfig(fp16=True, loss_scale=128.0))
    fixed.load_state(dynamic.state())
    assert fixed.scale == 128.0
