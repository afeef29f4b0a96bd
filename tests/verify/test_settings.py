"""Settings that the matrix's networks don't have, in layouts against one process; and what a proof does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megalite.config.fields import get
from megalite.config.schema import RunConfig
from megalite.distributed.pool import ProcessPool
from megalite.verify.configs import for_proof
from megalite.verify.layouts import Variant
from megalite.verify.proof import Prover
from megalite.verify.replace import unused_note
from tests.verify.networks import network

TOLERANCE = 1e-10
PP2 = Variant(pp=2, schedule="1f1b")
TP4 = Variant(tp=4)
VPP2 = Variant(pp=2, chunks=2, schedule="interleaved")


def _five_layers(first: int | None = None, last: int | None = None) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        config.model.num_layers = 5
        config.layout.decoder_first_pipeline_num_layers, config.layout.decoder_last_pipeline_num_layers = first, last

    return change


def _output_counts_as_a_layer(config: RunConfig) -> None:
    config.model.num_layers, config.layout.account_for_loss_in_pipeline_split = 5, True


def _middle_stage_alone(config: RunConfig) -> None:
    """Three stages for two layers: the middle one has none."""
    config.model.num_layers = 2
    config.layout.decoder_first_pipeline_num_layers = config.layout.decoder_last_pipeline_num_layers = 1


def _chunks_without_layers(config: RunConfig) -> None:
    config.model.num_layers = 2
    config.layout.account_for_embedding_in_pipeline_split = config.layout.account_for_loss_in_pipeline_split = True


def _network(**fields: Any) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        for name, value in fields.items():
            setattr(config.model, name, value)

    return change


BIASES = {"add_qkv_bias": True, "add_proj_bias": True}
LONGROPE = {
    "position_embedding_type": "longrope",
    "rope_original_max_position_embeddings": 8,
    "longrope_short_factor": [1.0, 1.1, 1.5, 2.0],
    "longrope_long_factor": [1.5, 2.0, 3.5, 8.0],
}


def _sgd(config: RunConfig) -> None:
    config.optimizer.optimizer, config.optimizer.clip_grad = "sgd", 0.5
    config.model.label_smoothing, config.learning_rate.decoupled_lr = 0.1, 1e-2


def _compiled(config: RunConfig) -> None:
    config.training.compile = True


@pytest.mark.parametrize(
    ("variant", "llama", "change"),
    [
        pytest.param(
            Variant(tp=2, sequence_parallel=True, pp=2, schedule="1f1b", recompute="selective"),
            True,
            _compiled,
            id="compiled",
            marks=pytest.mark.slow,
        ),
        pytest.param(PP2, False, _five_layers(first=2), id="2 layers first"),
        pytest.param(PP2, False, _five_layers(last=0), id="output alone on the last stage"),
        pytest.param(PP2, False, _output_counts_as_a_layer, id="the output counts as a layer"),
        pytest.param(Variant(pp=3, schedule="1f1b"), False, _middle_stage_alone, id="a stage of no layer"),
        pytest.param(VPP2, False, _chunks_without_layers, id="chunks of no layer"),
        pytest.param(Variant(tp=2, dp=2), False, _sgd, id="SGD, label smoothing, a rate of its own for the embedding"),
        pytest.param(TP4, True, _network(num_query_groups=1, add_bias_linear=True, add_qkv_bias=True), id="one group"),
        pytest.param(TP4, True, _network(qk_layernorm=False, **BIASES, **LONGROPE), id="attention's biases, longrope"),
        pytest.param(Variant(tp=2), False, _network(squared_relu=True, hidden_dropout=0.1), id="squared ReLU"),
    ],
)
def test_a_layout_with_other_settings_equals_one_process(
    pool: ProcessPool, variant: Variant, llama: bool, change: Callable[[RunConfig], None]
) -> None:
    config = variant.apply(network(variant, llama=llama))
    change(config)
    difference = Prover(pool, steps=2).prove(config, variant.processes)
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("--save-adapter a", "peft.save_adapter", "a"),
        ("--save-best-adapter b", "peft.save_best_adapter", "b"),
        ("--eval-prompt Hello", "finetune.eval_prompt", ["Hello"]),
        ("--train-epochs 3", "finetune.train_epochs", 3),
        ("--save c", "checkpoint.save", "c"),
    ],
)
def test_a_flag_that_a_proof_does_not_use_is_named(flag: str, path: str, value: object) -> None:
    config = RunConfig()
    room, name = path.split(".")
    setattr(getattr(config, room), name, value)
    proof = for_proof(config, 2)
    assert get(proof, path) is None
    (note,) = unused_note(config, proof)
    assert note.startswith(f"{flag}: not used")
