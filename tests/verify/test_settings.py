"""Settings that the matrix's networks don't have: a layout computes with them what one process computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megalite.config.schema import RunConfig
from megalite.distributed.pool import ProcessPool
from megalite.verify.layouts import Variant
from megalite.verify.proof import Prover
from tests.verify.networks import network

TOLERANCE = 1e-10
PP2 = Variant(pp=2, schedule="1f1b")
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


def _sgd(config: RunConfig) -> None:
    config.optimizer.optimizer, config.optimizer.clip_grad = "sgd", 0.5
    config.model.label_smoothing, config.learning_rate.decoupled_lr = 0.1, 1e-2


def _compiled(config: RunConfig) -> None:
    config.training.compile = True


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        pytest.param(
            Variant(tp=2, sequence_parallel=True, pp=2, schedule="1f1b", recompute="selective"),
            _compiled,
            id="compiled",
            marks=pytest.mark.slow,
        ),
        pytest.param(PP2, _five_layers(first=2), id="2 layers first"),
        pytest.param(PP2, _five_layers(last=0), id="output alone on the last stage"),
        pytest.param(PP2, _output_counts_as_a_layer, id="the output counts as a layer"),
        pytest.param(Variant(pp=3, schedule="1f1b"), _middle_stage_alone, id="a stage of no layer"),
        pytest.param(VPP2, _chunks_without_layers, id="chunks of no layer"),
        pytest.param(Variant(tp=2, dp=2), _sgd, id="SGD, label smoothing, a rate of its own for the embedding"),
    ],
)
def test_a_layout_with_other_settings_equals_one_process(
    pool: ProcessPool, variant: Variant, change: Callable[[RunConfig], None]
) -> None:
    config = variant.apply(network(variant))
    change(config)
    difference = Prover(pool, steps=3).prove(config, variant.processes)
    assert difference.worst <= TOLERANCE, difference
