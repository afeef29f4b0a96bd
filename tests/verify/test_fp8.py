"""With FP8 products too every layout computes what one process computes, on carriers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.precision.fp8 import Fp8Products
from megalite.precision.scaling import RECIPES
from megalite.verify.configs import resolved
from megalite.verify.layouts import Variant, variants
from megalite.verify.proof import Prover
from megalite.verify.trace import Trace, trace
from tests.verify.networks import network

TOLERANCE = 1e-10
SAMPLE = [
    Variant(tp=2, recompute="full"),
    Variant(tp=2, sequence_parallel=True, pp=2, schedule="zb-h1"),
    Variant(pp=2, chunks=2, schedule="interleaved", dp=2, sharding="optim"),
    Variant(dp=2, sharding="optim_grads_params", recompute="selective"),
]


def _network(variant: Variant, recipe: str, *, llama: bool = True, **precision: Any) -> RunConfig:
    fp8 = PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe, **precision)
    config = network(variant, llama=llama, tied=False, precision=fp8)
    if variant.recompute == "selective":
        config.training.recompute_modules = ["core_attn", "layernorm"]
    return config


def _worst(pool: ProcessPool, config: RunConfig, variant: Variant, tracer: Any = trace, steps: int = 3) -> float:
    return Prover(pool, steps=steps).prove(variant.apply(config), variant.processes, tracer=tracer).worst


# Each layout with half of the recipes, of which one scales whole tensors and one blocks; the others in the full matrix.
PAIRS = [
    pytest.param(
        recipe, variant, id=f"{recipe}, {variant}", marks=[] if (row + column) % 2 else pytest.mark.full_matrix
    )
    for row, recipe in enumerate(("delayed", "tensorwise", "mxfp8", "blockwise"))
    for column, variant in enumerate(SAMPLE)
]


@pytest.mark.parametrize(("recipe", "variant"), PAIRS)
def test_a_layout_equals_one_process(pool: ProcessPool, recipe: str, variant: Variant) -> None:
    assert _worst(pool, _network(variant, recipe), variant) <= TOLERANCE


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_ranks_that_have_copies_of_a_key_and_value_equal_one_process(pool: ProcessPool, recipe: str) -> None:
    variant = Variant(tp=2, sequence_parallel=True)
    config = _network(variant, recipe)
    config.model.num_query_groups = 1
    assert _worst(pool, config, variant) <= TOLERANCE


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_that_every_rank_has_whole_equal_one_process(pool: ProcessPool, sequence_parallel: bool) -> None:
    """Of multi-latent attention: with sequence parallelism each rank's input is a part, and so is its scale's amax."""
    variant = Variant(tp=2, sequence_parallel=sequence_parallel)
    fp8 = PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")
    assert _worst(pool, network(variant, latent=True, ahead=1, precision=fp8), variant) <= TOLERANCE


def test_a_delayed_scale_follows_the_largest_amax_of_all_ranks_in_its_history(pool: ProcessPool) -> None:
    variant = Variant(tp=2, dp=2, sharding="optim_grads")
    config = _network(variant, "delayed", fp8_amax_history_len=3, fp8_amax_compute_algo="max", fp8_margin=1)
    assert _worst(pool, config, variant, steps=6) <= TOLERANCE


def test_stages_of_a_model_whose_first_and_last_layers_are_not_in_fp8_equal_one_process(pool: ProcessPool) -> None:
    variant = Variant(pp=2, chunks=2, schedule="interleaved")
    config = _network(variant, "delayed", first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    assert _worst(pool, config, variant) <= TOLERANCE


def test_adapters_beside_fp8_weights_equal_one_process(pool: ProcessPool, tmp_path: Path) -> None:
    variant = Variant(tp=2, pp=2, schedule="1f1b")
    fp8 = PrecisionConfig(fp8_format="hybrid", fp8_recipe="delayed")
    config = network(variant, llama=True, finetuning="packed answers, LoRA", folder=tmp_path, precision=fp8)
    assert _worst(pool, config, variant) <= TOLERANCE


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_batches_that_are_cut_to_their_longest_sample_are_equally_long_in_all_layouts(
    pool: ProcessPool, tmp_path: Path, recipe: str
) -> None:
    """Sequence parallelism needs an even length, and what fills up a batch has part in its scales."""
    variant = Variant(tp=2, sequence_parallel=True)
    fp8 = PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe)
    config = network(variant, llama=True, finetuning="packed answers, all weights", folder=tmp_path, precision=fp8)
    config.finetune.sft_packing = False
    config.data.seq_length = config.model.max_position_embeddings = 40  # samples have up to 16
    config.training.global_batch_size = 8
    assert _worst(pool, config, variant) <= TOLERANCE


GATHERED = [
    Variant(tp=2, dp=2, sharding="optim"),
    Variant(dp=2, sharding="optim_grads", recompute="full"),
    Variant(pp=2, schedule="1f1b", dp=2, sharding="optim_grads_params"),
]


@pytest.mark.parametrize(
    ("recipe", "variant"), [*(("delayed", variant) for variant in GATHERED), ("tensorwise", GATHERED[0])], ids=str
)
def test_weights_that_are_stored_and_gathered_in_eight_bits_are_those_of_one_process(
    pool: ProcessPool, recipe: str, variant: Variant
) -> None:
    """One process rounds weights when it uses them."""
    assert _worst(pool, _network(variant, recipe, fp8_param_gather=True), variant) <= TOLERANCE


@pytest.mark.full_matrix
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "variant",
    list(variants(4, (None, "full"), ("no_shard", "optim", "optim_grads", "optim_grads_params"))),
    ids=str,
)
def test_every_layout_equals_one_process(pool: ProcessPool, recipe: str, variant: Variant) -> None:
    assert _worst(pool, _network(variant, recipe, llama=variant.dp == 1), variant, steps=4) <= TOLERANCE


def _scales_of_one_rank(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int) -> Trace | None:
    """Tensor-parallel ranks that don't tell each other how large their parts are."""

    def alone(amax: Tensor, *_: object) -> Tensor:
        return amax

    with mock.patch("megalite.precision.fp8.all_reduce", alone):
        return trace(mesh, values, steps)


def _wide_gradients(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int) -> Trace | None:
    """The output's gradient isn't quantised on ranks of a group, but in one process it is."""
    quantize = Fp8Products.quantize

    def lazy(self: Fp8Products, role: Any, x: Tensor) -> Any:
        quantized = quantize(self, role, x)
        if role == "gradient":
            object.__setattr__(quantized, "data", x / quantized.scale)
        return quantized

    with mock.patch.object(Fp8Products, "quantize", lazy):
        return trace(mesh, values, steps)


@pytest.mark.parametrize("tracer", [_scales_of_one_rank, _wide_gradients])
def test_a_planted_fault_is_found(pool: ProcessPool, tracer: Any) -> None:
    variant = Variant(tp=2)
    assert _worst(pool, _network(variant, "tensorwise"), variant, tracer) > TOLERANCE


def test_eight_bits_are_not_the_carrier(pool: ProcessPool) -> None:
    """A recipe that did nothing would pass all of the above."""
    losses = {}
    for recipe in (None, *RECIPES):
        config = _network(Variant(), recipe) if recipe else network(Variant(), llama=True, tied=False)
        losses[recipe] = _losses(pool, config)
    assert len({round(each, 9) for each in losses.values()}) == len(losses), losses
    assert max(abs(each - losses[None]) for each in losses.values()) < 0.02 * losses[None], losses


def _losses(pool: ProcessPool, config: RunConfig) -> float:
    results = pool.run(trace, 1, resolved(config, 1).to_dict(), 3, layout=Layout())
    assert isinstance(results[0], Trace) and torch.isfinite(torch.tensor(results[0].losses)).all()
    return results[0].losses[-1]
