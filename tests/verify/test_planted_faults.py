"""The proof finds what it is there to find: faults are planted in the workers, and the difference shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Box
from megalite.distributed.pieces import Piece
from megalite.distributed.pool import ProcessPool
from megalite.optimizer import lean
from megalite.optimizer.copies import CopySums
from megalite.training.objective import TokenLoss
from megalite.training.trainer import Trainer
from megalite.verify.configs import resolved
from megalite.verify.layouts import Variant
from megalite.verify.proof import Prover
from megalite.verify.trace import Trace, trace
from tests.optimizer.zero_runs import make_lean
from tests.verify.networks import FINETUNING, network

TOLERANCE = 1e-10
SEQUENCE_PARALLEL = (
    "layernorm.weight",
    "layernorm.bias",
    "position_embeddings.weight",
    "linear_proj.bias",
    "linear_fc2.bias",
)
"""Parameters that each tensor-parallel rank applies to its part of the tokens."""
REPLICATED = (
    *(f"linear_qkv.lora.{part}_proj.a" for part in "qkv"),
    *(f"linear_fc1.lora.{part}_proj.a" for part in ("gate", "up")),
    "linear_proj.lora.o_proj.b",
    "linear_fc2.lora.down_proj.b",
)
Values = dict[str, dict[str, Any]]


def no_copy_sums(mesh: Mesh, values: Values, steps: int, *, bar: bool = False) -> Trace | None:
    """Sequence parallelism whose norm gradients stay partial."""
    with mock.patch.object(CopySums, "reduce", return_value=None):
        return trace(mesh, values, steps)


def _tied_counted_twice(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """Every holder of a copy counts it in the norm."""

    def counted(piece: Piece, box: Box, mesh: Mesh) -> bool:
        return box.owner == mesh.rank or len(box.sum_over) > 1

    with mock.patch("megalite.optimizer.gradient_norm.is_counted_here", counted):
        return trace(mesh, values, steps)


def _swapped_stages(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """The second stage holds the layers of the first, and the other way round."""
    from megalite.models.stages import StageSpan, stage_spans

    def swapped(config: Any) -> list[list[StageSpan]]:
        spans = [ranks[0] for ranks in stage_spans(config)]
        layers = [(span.first_layer, span.last_layer) for span in reversed(spans)]
        return [
            [StageSpan(first, last, span.has_embedding, span.has_output, span.tied_stages)]
            for span, (first, last) in zip(spans, layers, strict=True)
        ]

    with mock.patch("megalite.training.model.stage_spans", swapped):
        return trace(mesh, values, steps)


def _local_normaliser(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """The loss is divided by the tokens of this data rank instead of all."""
    count = Trainer._count_tokens

    def local(self: Trainer, microbatches: Any) -> Any:
        return count(self, microbatches) / torch.tensor([mesh.dp.size, 1])

    with mock.patch.object(Trainer, "_count_tokens", local):
        return trace(mesh, values, steps)


@pytest.mark.parametrize(
    ("variant", "tracer", "where"),
    [
        (Variant(tp=2, sequence_parallel=True), no_copy_sums, "gradients"),
        (Variant(pp=2, schedule="1f1b"), _tied_counted_twice, "norm"),
        (Variant(pp=2, schedule="1f1b"), _swapped_stages, "loss"),
        (Variant(dp=2), _local_normaliser, "loss"),
    ],
    ids=["missing sequence-parallel sum", "tied embedding counted twice", "swapped stages", "wrong normaliser"],
)
def test_a_planted_fault_is_found(pool: ProcessPool, variant: Variant, tracer: Any, where: str) -> None:
    prover = Prover(pool, steps=2)
    config = variant.apply(network(variant, steps=2))
    difference = prover.prove(config, variant.processes, tracer=tracer)
    assert difference.worst > TOLERANCE
    if where in ("loss", "norm"):
        assert getattr(difference, where) > TOLERANCE
    else:
        wrong = {name for name, value in difference.parameters.items() if value > TOLERANCE}
        assert wrong == {name for name in difference.parameters if name.endswith(SEQUENCE_PARALLEL)}
    assert prover.prove(config, variant.processes).worst <= TOLERANCE


def _partial_key(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """The gradient of the key part that all heads share isn't summed over the ranks that have the heads."""
    with mock.patch("megalite.nn.latent_attention.sum_gradients", lambda x, group: x):
        return trace(mesh, values, steps)


def _tokens_of_a_rank(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """The losses of tokens ahead are divided by those of this data rank."""
    scales = TokenLoss.scales_ahead

    def local(self: TokenLoss, normalisers: torch.Tensor) -> torch.Tensor:
        return scales(self, normalisers / mesh.dp.size)

    with mock.patch.object(TokenLoss, "scales_ahead", local):
        return trace(mesh, values, steps)


@pytest.mark.parametrize(
    ("variant", "tracer", "where"),
    [
        (Variant(tp=2), _partial_key, "self_attention.linear_kv_down_proj.weight"),
        (Variant(tp=2, sequence_parallel=True), no_copy_sums, "mtp.layers.0.eh_proj.weight"),
        (Variant(dp=2), _tokens_of_a_rank, "mtp.layers.0.eh_proj.weight"),
    ],
    ids=["a shared key's gradient", "a replicated layer's gradient", "tokens ahead"],
)
def test_faults_of_latents_and_tokens_ahead_are_found(
    pool: ProcessPool, variant: Variant, tracer: Any, where: str
) -> None:
    prover = Prover(pool, steps=1)
    config = variant.apply(network(variant, latent=True, ahead=1, steps=1))
    found = prover.prove(config, variant.processes, tracer=tracer).parameters
    assert min(value for name, value in found.items() if name.endswith(where)) > 1e-3
    assert prover.prove(config, variant.processes).worst <= TOLERANCE


def _local_places(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """Random bits for rounding are those of an element's place on its rank."""

    def places(chunk: Any) -> torch.Tensor:
        return torch.arange(chunk.start, chunk.start + chunk.high - chunk.low)

    with mock.patch.object(lean._Chunk, "places", places):
        return trace(mesh, values, steps)


def test_rounding_of_states_that_depends_on_the_layout_is_found(pool: ProcessPool) -> None:
    prover, variant = Prover(pool, steps=3), Variant(tp=2)
    config = variant.apply(network(variant, steps=3))
    make_lean(config, "fp8")
    config.precision.main_grads_dtype = "fp32"
    assert prover.prove(config, 2, tracer=_local_places).worst > 1e-5
    assert prover.prove(config, 2).worst <= TOLERANCE


def test_a_replicated_factor_whose_gradient_stays_partial_is_found(pool: ProcessPool, tmp_path: Path) -> None:
    """Of LoRA: A beside a column-parallel layer, B beside a row-parallel one."""
    prover, variant = Prover(pool, steps=1), Variant(tp=2, sequence_parallel=True)
    config = variant.apply(network(variant, llama=True, finetuning="packed answers, LoRA", folder=tmp_path, steps=1))
    difference = prover.prove(config, 2, tracer=no_copy_sums)
    wrong = {name for name, value in difference.parameters.items() if value > TOLERANCE}
    assert wrong == {name for name in difference.parameters if name.endswith(REPLICATED)}
    assert min(difference.parameters[name] for name in wrong) > 1e-3


@pytest.mark.parametrize("kind", FINETUNING)
def test_every_trained_weight_has_a_gradient_to_compare(pool: ProcessPool, tmp_path: Path, kind: str) -> None:
    config = network(Variant(), llama=True, tied=False, finetuning=kind, folder=tmp_path, steps=1)
    (found,) = pool.run(trace, 1, resolved(config, 1).to_dict(), 1, layout=Layout())
    assert isinstance(found, Trace)
    assert all(gradient.abs().max() > 1e-6 * found.norms[0] for gradient in found.gradients.values())
