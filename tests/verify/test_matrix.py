"""Every layout computes what one process computes: pretraining, answers, packed or not, and labels, whole models and
adapters.

The full products of layouts, schedules, recompute and networks or kinds of fine-tuning run with `-m full_matrix`. By
default a part of them runs, on up to four processes. Pretraining: every two values of different axes meet that can, and
four ranks of one axis meet each value of the others once. Fine-tuning: each kind meets every value of each axis, every
sharding some adapter and some whole model, and every schedule some kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from megalite.config.schema import RunConfig
from megalite.distributed.pool import ProcessPool
from megalite.verify.layouts import SHARDINGS, Variant, variants
from megalite.verify.proof import Difference, Prover
from megalite.verify.trace import Trace
from tests.verify.networks import FINETUNING, WITH_GPT2S_LAYERS, covering, network

TOLERANCE = 1e-10
RECOMPUTE = (None, "full", "selective")


@pytest.fixture(scope="session")
def truths() -> dict[str, Trace]:
    """Traces of one process, kept: many layouts share one."""
    return {}


def _check(pool: ProcessPool, truths: dict[str, Trace], variant: Variant, config: RunConfig, steps: int) -> Difference:
    difference = Prover(pool, steps=steps, _truths=truths).prove(variant.apply(config), variant.processes)
    assert difference.worst <= TOLERANCE, difference
    return difference


# -------------------------------------------------------------------------------------------------------- pretraining

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


def _pretrains(pool: ProcessPool, truths: dict[str, Trace], case: Case, steps: int) -> None:
    variant, tied, dropout, llama = case
    difference = _check(pool, truths, variant, network(variant, tied=tied, dropout=dropout, llama=llama), steps)
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
    _pretrains(pool, truths, case, 2)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", FULL, ids=_name)
def test_every_layout_equals_one_process(pool: ProcessPool, truths: dict[str, Trace], case: Case) -> None:
    _pretrains(pool, truths, case, 10)


# -------------------------------------------------------------- latent attention and further tokens

Kind = tuple[bool, int]  # multi-latent attention, tokens predicted beside the next
LATENT: list[tuple[Variant, Kind]] = [
    (Variant(tp=2, sequence_parallel=True, pp=2, schedule="zb-h1", recompute="selective"), (True, 2)),
    (Variant(tp=2, dp=2, sharding="optim_grads_params"), (True, 1)),
    (Variant(pp=2, chunks=2, dp=2, schedule="interleaved", recompute="full", sharding="optim_grads"), (False, 2)),
    (Variant(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads_params", recompute="full"), (True, 2)),
    (Variant(pp=2, dp=2, schedule="1f1b", sharding="optim_grads_params"), (False, 1)),
]


def _is_latent(pool: ProcessPool, truths: dict[str, Trace], variant: Variant, kind: Kind, steps: int) -> None:
    latent, ahead = kind
    config = network(variant, tied=ahead == 1, dropout=0.1 * (variant.dp - 1), latent=latent, ahead=ahead)
    _check(pool, truths, variant, config, steps)


@pytest.mark.parametrize(("variant", "kind"), LATENT, ids=str)
def test_layout_with_latents_or_tokens_ahead_equals_one_process(
    pool: ProcessPool, truths: dict[str, Trace], variant: Variant, kind: Kind
) -> None:
    _is_latent(pool, truths, variant, kind, 2)


@pytest.mark.full_matrix
@pytest.mark.parametrize("kind", [(True, 0), (True, 2), (False, 1)], ids=str)
@pytest.mark.parametrize("variant", list(dict.fromkeys(case[0] for case in FULL)), ids=str)
def test_every_layout_with_latents_or_tokens_ahead_equals_one_process(
    pool: ProcessPool, truths: dict[str, Trace], variant: Variant, kind: Kind
) -> None:
    _is_latent(pool, truths, variant, kind, 10)


# -------------------------------------------------------------------------------------------------------- fine-tuning

Tuning = tuple[Variant, str]


def _tunings(processes: int) -> Iterator[Tuning]:
    """Every case with two data-parallel ranks shards in one of the four ways, by turns."""
    shardings = itertools.cycle(SHARDINGS)
    for kind in FINETUNING:
        for variant in variants(processes, (None, "full")):
            sharding = next(shardings) if variant.dp > 1 else "no_shard"
            yield dataclasses.replace(variant, sharding=sharding), kind


FEW = [case for case in _tunings(4) if max(case[0].tp, case[0].pp) == 2 and case[0].schedule != "gpipe"]
# Each two ranks share a group of keys and values.
SHARED = [(Variant(tp=4, sequence_parallel=True), kind) for kind in list(FINETUNING)[0:3:2]]


def _tuning_values(case: Tuning) -> list[tuple[str, Hashable]]:
    variant, kind = case
    return [
        ("tp", (kind, variant.tp, variant.sequence_parallel)),
        ("pp", (kind, variant.pp, variant.chunks)),
        ("schedule", variant.schedule),
        ("dp", (kind, variant.dp)),
        ("sharding", (FINETUNING[kind][1].peft is None, variant.sharding)),
        ("recompute", (kind, variant.recompute)),
    ]


def _tunes(pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Tuning, steps: int) -> None:
    variant, kind = case
    llama = kind not in WITH_GPT2S_LAYERS
    config = network(variant, llama=llama, tied=not llama, finetuning=kind, folder=folder, steps=steps)
    config.model.init_method_std = 0.1  # so that an adapter shows in the loss
    _check(pool, truths, variant, config, steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.mark.parametrize(
    "case",
    [*covering(FEW, _tuning_values, 1, lambda case: case[0].processes), *SHARED],
    ids=lambda case: f"{case[0]}, {case[1]}",
)
def test_layout_fine_tunes_as_one_process(
    pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Tuning
) -> None:
    _tunes(pool, truths, folder, case, 2)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", list(_tunings(8)), ids=lambda case: f"{case[0]}, {case[1]}")
def test_every_layout_fine_tunes_as_one_process(
    pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Tuning
) -> None:
    _tunes(pool, truths, folder, case, 10)
