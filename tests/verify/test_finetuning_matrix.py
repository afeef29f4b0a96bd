"""Every layout fine-tunes as one process does: answers, packed or not, and labels; whole models and adapters.

All combinations run with `-m full_matrix`; by default a few on up to four processes, in which each kind of fine-tuning
meets every value of each axis, every sharding some adapter and some whole model, and every schedule some kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from megalite.distributed.pool import ProcessPool
from megalite.verify.layouts import SHARDINGS, Variant, variants
from megalite.verify.proof import Prover
from megalite.verify.trace import Trace
from tests.verify.networks import FINETUNING, WITH_GPT2S_LAYERS, covering, network

TOLERANCE = 1e-10
Case = tuple[Variant, str]


def _cases(processes: int) -> Iterator[Case]:
    """Every case with two data-parallel ranks shards in one of the four ways, by turns."""
    shardings = itertools.cycle(SHARDINGS)
    for kind in FINETUNING:
        for variant in variants(processes, (None, "full")):
            sharding = next(shardings) if variant.dp > 1 else "no_shard"
            yield dataclasses.replace(variant, sharding=sharding), kind


FULL = list(_cases(8))
SMALL = [case for case in _cases(4) if max(case[0].tp, case[0].pp) == 2 and case[0].schedule != "gpipe"]


def _values(case: Case) -> list[tuple[str, Hashable]]:
    variant, kind = case
    return [
        ("tp", (kind, variant.tp, variant.sequence_parallel)),
        ("pp", (kind, variant.pp, variant.chunks)),
        ("schedule", variant.schedule),
        ("dp", (kind, variant.dp)),
        ("sharding", (FINETUNING[kind][1].peft is None, variant.sharding)),
        ("recompute", (kind, variant.recompute)),
    ]


# Each two ranks share a group of keys and values.
SHARED = [(Variant(tp=4, sequence_parallel=True), kind) for kind in list(FINETUNING)[0:3:2]]


def _name(case: Case) -> str:
    return f"{case[0]}, {case[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def truths() -> dict[str, Trace]:
    """Traces of one process, kept: many layouts share one."""
    return {}


def _check(pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Case, steps: int) -> None:
    variant, kind = case
    prover = Prover(pool, steps=steps, _truths=truths)
    llama = kind not in WITH_GPT2S_LAYERS
    config = network(variant, llama=llama, tied=not llama, finetuning=kind, folder=folder, steps=steps)
    config.model.init_method_std = 0.1  # so that an adapter shows in the loss
    difference = prover.prove(variant.apply(config), variant.processes)
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize("case", [*covering(SMALL, _values, 1, lambda case: case[0].processes), *SHARED], ids=_name)
def test_layout_fine_tunes_as_one_process(
    pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Case
) -> None:
    _check(pool, truths, folder, case, 2)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", FULL, ids=_name)
def test_every_layout_fine_tunes_as_one_process(
    pool: ProcessPool, truths: dict[str, Trace], folder: Path, case: Case
) -> None:
    _check(pool, truths, folder, case, 10)
