"""Kinds of adapter in the hardest layouts against one process, in float64.

The layouts one by one, with sharding: `tests/verify/test_finetuning_matrix.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from megalite.distributed.pool import ProcessPool
from megalite.verify.proof import Prover
from tests.peft.runs import adapter_config

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"peft": "lora", "lora_target_modules": ["all-linear"]},
    "lora with dropout and some targets": {
        "peft": "lora",
        "lora_dropout": 0.3,
        "lora_target_modules": ["q_proj,v_proj", "down_proj"],
        "use_rslora": True,
        "dropout": 0.1,
    },
    "prefix": {"peft": "prefix"},
    "prefix from a network": {"peft": "prefix", "prefix_projection": True, "prefix_hidden_size": 12},
    "prompt": {"peft": "prompt"},
    "lora on gpt2's layers": {"peft": "lora", "llama": False, "tied": True, "lora_target_modules": ["all-linear"]},
    "prompt on gpt2's layers": {"peft": "prompt", "llama": False, "tied": True, "dropout": 0.1},
}

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP 4, keys and values shared": (4, {TP: 4, "sequence_parallel": True, "num_layers": 2}),
    "TP 2 x PP 2, VPP 2, recompute": (
        4,
        {
            TP: 2,
            PP: 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}
PIPELINE = "TP 2 x PP 2, VPP 2, recompute"
SHARED = "TP 4, keys and values shared"
PROVED_BY_HARDER_KINDS = ("lora", "prefix")  # with dropout, from a network


@pytest.fixture(scope="module")
def prover(pool: ProcessPool) -> Prover:
    return Prover(pool, steps=2)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, PIPELINE) for kind in KINDS if kind not in PROVED_BY_HARDER_KINDS),
        *(pytest.param(kind, PIPELINE, marks=pytest.mark.full_matrix) for kind in PROVED_BY_HARDER_KINDS),
        *((kind, SHARED) for kind in ("lora", "prefix")),
    ],
)
def test_losses_and_gradients_equal_one_process(prover: Prover, kind: str, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    assert prover.prove(adapter_config(**KINDS[kind], **flags), ranks).worst <= 1e-10
