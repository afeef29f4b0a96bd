"""An activation that isn't finite on one rank of TP 2 x PP 2: all ranks skip the step, and only that one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.config.schema import PrecisionConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.linear import ParallelLinear
from megalite.verify.configs import resolved
from megalite.verify.layouts import Variant
from tests.peft.runs import run_of
from tests.verify.networks import network

VARIANT = Variant(tp=2, pp=2, schedule="1f1b")
FP16 = {"fp16": True, "initial_loss_scale": 256.0}
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": FP16,
    "FP8, delayed": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "FP8, blocks": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "FP8 in fp16": {**FP16, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}


def _skips(mesh: Mesh, values: dict[str, Any], faulty: int, bad: float) -> tuple[list[bool], int, bool]:
    """Whether each of four steps was skipped, how many were, and whether all the rank's state stayed finite; in the
    second step one of the `faulty` rank's inputs of a linear layer has a `bad` number."""
    run = run_of(mesh, values)
    layer = next(module for module in run.model.stages[0].modules() if isinstance(module, ParallelLinear))
    planted = False

    def plant(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not planted or mesh.rank != faulty:
            return args
        x = args[0].clone()
        x[0, 0, 3] = bad
        return (x, *args[1:])

    layer.register_forward_pre_hook(plant)
    skipped = []
    for step in range(4):
        planted = step == 1
        skipped.append(run.trainer.step().skipped)
    run.close()
    pieces = run.model.entries(state=True, frozen=True)
    return skipped, run.state.skipped, all(bool(piece.flat.isfinite().all()) for piece in pieces)


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_skip_alike(pool: ProcessPool, mode: str) -> None:
    precision = PrecisionConfig(**MODES[mode])
    config = VARIANT.apply(network(VARIANT, precision=precision))
    config.precision, config.training.nan_action = precision, "skip"  # a proof's is fp64
    values = resolved(config, VARIANT.processes).to_dict()
    layout = Layout.from_config(config.layout, VARIANT.processes)
    for faulty, bad in ((1, math.inf), (2, math.nan)):  # of the first stage, and of the last
        told = pool.run(_skips, VARIANT.processes, values, faulty, bad, layout=layout)
        assert told == [([False, True, False, False], 1, True)] * VARIANT.processes
