"""Which dtype serves what."""

from __future__ import annotations

import pytest
import torch

from megalite.config.schema import PrecisionConfig
from megalite.precision.policy import Precision


@pytest.mark.parametrize(
    ("config", "compute", "wide", "reduce", "main"),
    [
        (PrecisionConfig(), torch.float32, torch.float32, torch.float32, False),
        (PrecisionConfig(bf16=True), torch.bfloat16, torch.float32, torch.float32, True),
        (PrecisionConfig(fp16=True), torch.float16, torch.float32, torch.float32, True),
        (PrecisionConfig(fp64=True), torch.float64, torch.float64, torch.float64, False),
        (PrecisionConfig(bf16=True, grad_reduce_in_bf16=True), torch.bfloat16, torch.float32, torch.bfloat16, True),
    ],
)
def test_the_policy_of_every_format(
    config: PrecisionConfig, compute: torch.dtype, wide: torch.dtype, reduce: torch.dtype, main: bool
) -> None:
    policy = Precision.from_config(config)
    assert (policy.compute, policy.wide, policy.reduce, policy.needs_main_parameters) == (compute, wide, reduce, main)
