"""Every layout computes what one process computes.

The full product of layouts, schedules, recompute, tied or untied output and dropout runs with `-m full_matrix`; by
default a part of it runs, on up to four processes, in which every two values of different axes meet that can; four
ranks of one axis meet each value of the others once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest

from megalite.distributed.pool import ProcessPool
from megalite.verify.layouts import SHARDINGS, Variant, variants
from megalite.verify.proof import Prover
from megalite.verify.trace import Trace
from tests.verify.networks import covering, network

TOLERANCE = 1e-10
RECOMPUTE = (None, "full", "selective")
Case = tuple[Variant, bool, float, bool]  # layout, tied, dropout, Llama's kinds of layer

CASES: list[Case] = [
    (variant, tied, dropout, tied != bool(dropout))
    for variant in variants(8, RECOMPUTE)
    for tied in (True, False)
    for dropout in (0.0, 0.1)
]
# Every case with two data-parallel ranks shards in one of the four ways, by turns that meet all of the above.
FULL: list[Case] = [
    (
        dataclasses.replace(variant, sharding=SHARDINGS[(number + number // 4) % 4] if variant.dp > 1 else "no_shard"),
        *rest,
    )
    for number, (variant, *rest) in enumerate(CASES)
]
SMALL = [case for case in FULL if case[0].processes <= 4]
FOUR_RANKS = [case for case in SMALL if max(case[0].tp, case[0].pp) == 4]
# To schedules and tensor-parallel ranks, which end a backward with whole gradients in both, these two are one.
WHOLE_GRADIENTS = ("no_shard", "optim")


def _values(case: Case) -> list[tuple[str, Hashable]]:
    variant, tied, dropout, _ = case
    return [
        ("tp", (variant.tp, variant.sequence_parallel)),
        ("pp", variant.pp),
        ("schedule", variant.schedule),
        ("dp", variant.dp),
        ("sharding", None if variant.sharding in WHOLE_GRADIENTS else variant.sharding),
        ("recompute", variant.recompute),
        ("tied", tied),
        ("dropout", dropout),
    ]


def _name(case: Case) -> str:
    variant, tied, dropout, llama = case
    return f"{variant}, {'tied' if tied else 'untied'}, dropout {dropout}, {'llama' if llama else 'gpt2'}"


@pytest.fixture(scope="session")
def truths() -> dict[str, Trace]:
    """Traces of one process, kept: many layouts share one."""
    return {}


def _check(pool: ProcessPool, truths: dict[str, Trace], case: Case, steps: int) -> None:
    prover = Prover(pool, steps=steps, _truths=truths)
    variant, tied, dropout, llama = case
    config = variant.apply(network(variant, tied=tied, dropout=dropout, llama=llama))
    difference = prover.prove(config, variant.processes)
    assert difference.worst <= TOLERANCE, difference
    if variant.tp == variant.dp == 1 and not tied:
        assert difference.bitwise, difference


def _chosen() -> list[Case]:
    few_ranks = [case for case in SMALL if case not in FOUR_RANKS]
    return [
        *covering(few_ranks, _values, 2, lambda case: case[0].processes),
        *covering(FOUR_RANKS, _values, 1, lambda case: case[0].processes),
    ]


@pytest.mark.parametrize("case", _chosen(), ids=_name)
def test_layout_equals_one_process(pool: ProcessPool, truths: dict[str, Trace], case: Case) -> None:
    _check(pool, truths, case, 2)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", FULL, ids=_name)
def test_every_layout_equals_one_process(pool: ProcessPool, truths: dict[str, Trace], case: Case) -> None:
    _check(pool, truths, case, 10)
