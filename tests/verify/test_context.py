"""Sequences that are cut over context-parallel ranks compute what one process computes, whatever the ranks exchange.

Each exchange meets each value of every other axis, each kind of fine-tuning, and the settings that look at places:
documents, windows, rotary kinds, dropout. The full products run with `-m full_matrix`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.layout import DENSE
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.tokens import Tokens
from megalite.verify.layouts import EXCHANGES, SHARDINGS, Variant, variants
from megalite.verify.proof import Prover
from megalite.verify.trace import Trace, trace
from tests.verify.networks import FINETUNING, covering, network

TOLERANCE = 1e-10
RECOMPUTE = (None, "full", "selective")
Case = tuple[Variant, bool, float]  # layout, Llama's kinds of layer and documents by themselves, dropout


def _cases(processes: int) -> Iterator[Case]:
    shardings = itertools.cycle(SHARDINGS)
    for variant in variants(processes, RECOMPUTE, contexts=(2, 4)):
        for llama, dropout in ((True, 0.0), (False, 0.1), (True, 0.1)):
            yield dataclasses.replace(variant, sharding=next(shardings)), llama, dropout


def _values(case: Case) -> list[tuple[str, Hashable]]:
    variant, llama, dropout = case
    exchange = variant.exchange
    return [
        ("cp", (exchange, variant.cp, llama)),
        ("tp", (exchange, variant.tp, variant.sequence_parallel)),
        ("schedule", (exchange, variant.schedule)),
        ("sharding", (exchange, variant.sharding)),
        ("recompute", (exchange, variant.recompute, dropout > 0)),
        ("dp", variant.dp),
    ]


def _prove(pool: ProcessPool, case: Case, steps: int = 2) -> None:
    variant, llama, dropout = case
    config = network(variant, llama=llama, tied=not llama, dropout=dropout, steps=steps)
    difference = Prover(pool, steps=steps).prove(variant.apply(config), variant.processes)
    assert difference.worst <= TOLERANCE, difference


def _name(case: Case) -> str:
    return f"{case[0]}, {'llama' if case[1] else 'gpt2'}, dropout {case[2]}"


@pytest.mark.parametrize("case", covering(list(_cases(4)), _values, 1, lambda case: case[0].processes), ids=_name)
def test_layout_equals_one_process(pool: ProcessPool, case: Case) -> None:
    _prove(pool, case)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", list(_cases(8)), ids=_name)
def test_every_layout_equals_one_process(pool: ProcessPool, case: Case) -> None:
    _prove(pool, case, 5)


TUNINGS = [
    (kind, Variant(cp=cp, exchange=exchange, recompute="full" if cp == 4 else None))
    for kind in FINETUNING
    for cp in (2, 4)
    for exchange in EXCHANGES[cp]
    if cp == 2 or exchange == "a2a+p2p"
]
MORE_TUNINGS = [
    (kind, Variant(tp=2, sequence_parallel=True, cp=2, exchange=exchange, pp=pp, schedule="1f1b", dp=dp, sharding=how))
    for kind, exchange in itertools.product(FINETUNING, EXCHANGES[2])
    for pp, dp, how in ((1, 1, "no_shard"), (2, 1, "no_shard"), (1, 2, "optim_grads_params"))
]


@pytest.mark.parametrize(
    ("kind", "variant"),
    [*TUNINGS, *(pytest.param(*case, marks=pytest.mark.full_matrix) for case in MORE_TUNINGS)],
    ids=str,
)
def test_layout_fine_tunes_as_one_process(pool: ProcessPool, tmp_path: Path, kind: str, variant: Variant) -> None:
    """Batches are cut to their longest sample; virtual tokens are on every rank."""
    config = network(variant, llama=variant.cp == 2, finetuning=kind, folder=tmp_path, steps=2)
    config.model.init_method_std = 0.1
    difference = Prover(pool, steps=2).prove(variant.apply(config), variant.processes)
    assert difference.worst <= TOLERANCE, difference


LONGROPE: dict[str, Any] = {
    "position_embedding_type": "longrope",
    "rope_original_max_position_embeddings": 8,
    "longrope_short_factor": [1.0, 1.1, 1.5, 2.0],
    "longrope_long_factor": [1.5, 2.0, 3.5, 8.0],
}
DYNAMIC: dict[str, Any] = {"position_embedding_type": "dynamic", "rope_original_max_position_embeddings": 8}
WINDOW: dict[str, Any] = {"window_size": "3,0"}
SETTINGS = [
    (Variant(cp=2), True, {**WINDOW, **DYNAMIC}),
    (Variant(cp=2, exchange="all_gather"), False, {**WINDOW, "num_query_groups": 1}),
    (Variant(cp=4, exchange="a2a"), True, {"num_query_groups": 1, **LONGROPE}),
    (Variant(cp=4, exchange="a2a+p2p"), False, {**WINDOW, "rotary_interleaved": True, "rotary_percent": 0.5}),
    (Variant(tp=2, sequence_parallel=True, cp=2, exchange="a2a"), False, WINDOW),
    (Variant(cp=2), False, {**WINDOW, "attention_dropout": 0.1, "attention_backend": "unfused"}),
]


@pytest.mark.parametrize(("variant", "documents", "fields"), SETTINGS, ids=str)
def test_what_looks_at_places_looks_at_those_in_the_sequence(
    pool: ProcessPool, variant: Variant, documents: bool, fields: dict[str, Any]
) -> None:
    config = variant.apply(network(variant, llama=True, tied=False, steps=2))
    for name, value in fields.items():
        setattr(config.model, name, value)
    config.data.reset_position_ids = config.data.reset_attention_mask = documents
    difference = Prover(pool, steps=2).prove(config, variant.processes)
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize(
    ("recipe", "variant", "length"),
    [
        ("delayed", Variant(cp=2, exchange="a2a"), 16),
        ("tensorwise", Variant(tp=2, sequence_parallel=True, cp=2, exchange="all_gather", recompute="full"), 16),
        ("mxfp8", Variant(cp=2), 128),
    ],
    ids=str,
)
def test_scales_in_eight_bits_are_those_of_whole_sequences(
    pool: ProcessPool, recipe: str, variant: Variant, length: int
) -> None:
    config = network(variant, llama=True, precision=PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe), steps=3)
    config.data.seq_length = config.model.max_position_embeddings = length
    assert Prover(pool, steps=3).prove(variant.apply(config), variant.processes).worst <= TOLERANCE


# ------------------------------------------------------------------------------------------------------ planted faults

Values = dict[str, dict[str, Any]]


def _sums_of_one_block(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """All blocks count as if their sums of exponentials were 1."""
    from megalite.nn import context_attention

    merge = context_attention._merge

    def flat(out: Tensor, sums: Tensor, part: Tensor, logs: Tensor) -> None:
        merge(out, sums, part, torch.zeros_like(logs))

    with mock.patch.object(context_attention, "_merge", flat):
        return trace(mesh, values, steps)


def _second_half_shifted(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """A rank's second chunk is one position off."""
    at = Tokens.at

    def shifted(index: Tensor | None, positions: Tensor, documents: Tensor | None = None) -> Tokens:
        tokens = at(index, positions, documents)
        moved = tokens.positions.clone()
        moved[:, moved.shape[1] // 2 :] -= 1
        return dataclasses.replace(tokens, positions=moved)

    with mock.patch.object(Tokens, "at", shifted):
        return trace(mesh, values, steps)


def _gradients_of_one_part(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """Gradients are summed over data-parallel ranks alone."""
    along = Mesh.along

    def alone(self: Mesh, axes: tuple[str, ...]) -> Group:
        return self.dp if axes == DENSE.data_axes else along(self, axes)

    with mock.patch.object(Mesh, "along", alone):
        return trace(mesh, values, steps)


@pytest.mark.parametrize("tracer", [_sums_of_one_block, _second_half_shifted, _gradients_of_one_part])
def test_a_planted_fault_is_found(pool: ProcessPool, tracer: Callable[..., Trace | None]) -> None:
    variant = Variant(cp=2)
    config: RunConfig = variant.apply(network(variant, llama=True, steps=2))
    prover = Prover(pool, steps=2)
    assert prover.prove(config, 2, tracer=tracer).worst > 1e-4
    assert prover.prove(config, 2).worst <= TOLERANCE
