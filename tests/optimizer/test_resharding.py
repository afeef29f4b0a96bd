"""Parameters and the optimizer's state survive every change of layout and sharding bit by bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.training.prepare import prepare_config
from megalite.training.run import build_run
from megalite.verify.configs import resolved
from megalite.verify.layouts import Variant
from tests.optimizer.zero_runs import STRATEGIES, assemble_pieces
from tests.verify.networks import FOUR_LAYERS, network


def _train_or_pass_on(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int) -> tuple[dict[str, Tensor], int]:
    """Load what there is, train, save; the whole parameters and state, and the optimizer's count of updates."""
    size = mesh.world.size
    run = build_run(prepare_config(RunConfig.from_dict(values), Environment(mesh.rank, size, mesh.rank, size)), mesh)
    for _ in range(steps):
        run.trainer.step()
    run.save()
    pieces = [*run.optimizer.parameter_pieces().values()]
    pieces += [piece._replace(name=key) for key, piece in run.optimizer.named_state()]
    whole = assemble_pieces(pieces, mesh)
    run.close()
    return whole, run.optimizer.steps


def pass_on(
    pool: ProcessPool, variant: Variant, *, load: Path | None, save: Path, steps: int = 0, bf16: bool = True
) -> tuple[dict[str, Tensor], int]:
    config = variant.apply(network(FOUR_LAYERS))
    config.precision.fp64, config.precision.bf16 = False, bf16
    config.training.global_batch_size = 12
    config.checkpoint.load, config.checkpoint.save = (None if load is None else str(load)), str(save)
    given = resolved(config, variant.processes)
    layout = Layout.from_config(given.layout, variant.processes)
    result: tuple[dict[str, Tensor], int] = pool.run(
        _train_or_pass_on, variant.processes, given.to_dict(), steps, layout=layout, timeout=120
    )[0]
    return result


def assert_equal(a: tuple[dict[str, Tensor], int], b: tuple[dict[str, Tensor], int]) -> None:
    assert a[1] == b[1]
    assert a[0].keys() == b[0].keys()
    for name, tensor in a[0].items():
        assert torch.equal(tensor, b[0][name]), name
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.full_matrix) for turn in (1, 2, 3))])
def test_dp_4_to_2_to_3_to_1_through_every_stage(pool: ProcessPool, tmp_path: Path, turn: int) -> None:
    """Each chain begins with another stage, and each change of ranks is also one of stage."""
    stages = [STRATEGIES[(turn + step) % 4] for step in range(4)]
    truth = pass_on(pool, Variant(dp=4, sharding=stages[0]), load=None, save=tmp_path / "0", steps=2)
    assert truth[1] == 2
    for number, (ranks, stage) in enumerate(zip((2, 3, 1), stages[1:], strict=True)):
        variant = Variant(dp=ranks, sharding=stage if ranks > 1 else "no_shard")
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        assert_equal(pass_on(pool, variant, load=load, save=save), truth)


def test_every_stage_reads_every_other(pool: ProcessPool, tmp_path: Path) -> None:
    """A walk over all twelve pairs of stages; what each read it passes on."""
    walk = [STRATEGIES[number] for number in (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0)]
    assert len(set(itertools.pairwise(walk))) == 12
    truth = pass_on(pool, Variant(dp=2, sharding=walk[0]), load=None, save=tmp_path / "0", steps=1)
    for number, stage in enumerate(walk[1:]):
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        assert_equal(pass_on(pool, Variant(dp=2, sharding=stage), load=load, save=save), truth)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full_matrix)])
def test_tp_2_dp_2_and_stages_to_one_process_and_back(pool: ProcessPool, tmp_path: Path, pp: int) -> None:
    wide = Variant(tp=2, pp=pp, dp=2, schedule="1f1b", sharding="optim_grads_params")
    truth = pass_on(pool, wide, load=None, save=tmp_path / "0", steps=2)
    assert_equal(pass_on(pool, Variant(), load=tmp_path / "0", save=tmp_path / "1"), truth)
    assert_equal(pass_on(pool, wide, load=tmp_path / "1", save=tmp_path / "2"), truth)


def test_a_step_after_a_change_of_stage_is_the_step_without_it(pool: ProcessPool, tmp_path: Path) -> None:
    straight = pass_on(pool, Variant(dp=2), load=None, save=tmp_path / "0", steps=2, bf16=False)
    half = pass_on(pool, Variant(dp=2), load=None, save=tmp_path / "1", steps=1, bf16=False)
    assert half[1] == 1
    rest = Variant(dp=2, sharding="optim")
    assert_equal(pass_on(pool, rest, load=tmp_path / "1", save=tmp_path / "2", steps=1, bf16=False), straight)
