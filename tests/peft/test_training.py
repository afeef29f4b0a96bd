"""What training an adapter keeps, changes and leaves alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.distributed.pool import ProcessPool
from tests.peft.runs import adapter_config, run_adapter

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP 2": (2, {TP: 2, "sequence_parallel": True}),
    "PP 2": (2, {PP: 2}),
    "TP 2, PP 2": (4, {TP: 2, PP: 2, "sequence_parallel": True}),
    "ZeRO-3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}
SHORT = [("lora", "TP 2"), ("lora", "ZeRO-3"), ("prompt", "PP 2")]
FULL = [case for case in itertools.product(("lora", "prompt"), LAYOUTS) if case not in SHORT]


@pytest.mark.parametrize(
    ("kind", "layout"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.full_matrix) for case in FULL)]
)
def test_a_resumed_run_equals_a_straight_one(pool: ProcessPool, tmp_path: Path, kind: str, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    given = adapter_config(kind, fp64=False, **flags)
    straight = run_adapter(pool, given, ranks, steps=2)[0]
    given.checkpoint.save = str(tmp_path / "run")
    first = run_adapter(pool, given, ranks, steps=1)[0]
    given.checkpoint.load = given.checkpoint.save
    second = run_adapter(pool, given, ranks, steps=1)[0]
    assert [*first.losses, *second.losses] == straight.losses
    assert [*first.norms, *second.norms] == straight.norms
    assert all(torch.equal(second.adapter[name], straight.adapter[name]) for name in straight.adapter)


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
def test_frozen_weights_are_unchanged_and_cost_no_state(pool: ProcessPool, kind: str) -> None:
    overrides = {"bf16": True, "fp64": False}
    outcome = run_adapter(pool, adapter_config(kind, **overrides), 1)[0]
    assert outcome.before.keys() == outcome.after.keys()
    assert all(torch.equal(outcome.before[name], outcome.after[name]) for name in outcome.before)
    trained = sum(tensor.numel() for tensor in outcome.adapter.values())
    frozen = sum(tensor.numel() for tensor in outcome.before.values())
    assert frozen > 5 * trained
    rounding = 1024 + 128 * len(outcome.adapter)  # each parameter begins at a multiple of 128
    for what, size in (("parameters", 2), ("gradients", 4), ("main", 4), ("moments", 8)):
        assert size * trained <= outcome.held[what] <= size * (trained + rounding)


def test_every_adapter_weight_learns_and_only_the_rank_that_writes_them_gathers_them(pool: ProcessPool) -> None:
    config = adapter_config("lora", lora_target_modules=["all-linear"], **{TP: 2, "sequence_parallel": True})
    outcomes = run_adapter(pool, config, 2, steps=1)
    names = outcomes[0].adapter.keys()
    assert len(names) == 4 * 7 * 2  # A and B in each of four layers, beside q, k, v, o, gate, up, down
    assert all(outcomes[0].gradients[name].abs().max() > 0 for name in names)
    assert all(not outcome.adapter for outcome in outcomes[1:])


def test_a_stage_without_trained_weights_takes_part(pool: ProcessPool) -> None:
    """Prompt tuning trains the first stage alone."""
    config = adapter_config("prompt", **{PP: 2, "data_parallel_sharding_strategy": "optim"})
    truth = adapter_config("prompt")
    config.training.global_batch_size = truth.training.global_batch_size = 8
    outcomes, single = run_adapter(pool, config, 4), run_adapter(pool, truth, 1)[0]
    assert outcomes[0].losses == pytest.approx(single.losses, rel=1e-10)
    assert outcomes[0].norms == pytest.approx(single.norms, rel=1e-10)
