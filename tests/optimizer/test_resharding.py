"""Parameters and the optimizer's state survive every change of layout and sharding bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.distributed.pool import ProcessPool
from megalite.verify.layouts import Variant
from tests.optimizer.zero_runs import LEAN, STRATEGIES, Outcome, make_lean, run_zero
from tests.verify.networks import FOUR_LAYERS, network


def pass_on(
    pool: ProcessPool,
    variant: Variant,
    *,
    load: Path | None,
    save: Path,
    steps: int = 0,
    bf16: bool = True,
    states: str | None = None,
    background: bool = False,
    batch: int = 12,
) -> Outcome:
    """Load what there is, train, save. `states`: a key of LEAN. `background`: write while the run goes on."""
    config = variant.apply(network(FOUR_LAYERS))
    config.precision.fp64, config.precision.bf16 = False, bf16
    if states is not None:
        make_lean(config, states)
    config.training.global_batch_size = batch
    config.checkpoint.async_save = background
    config.checkpoint.load, config.checkpoint.save = (None if load is None else str(load)), str(save)
    return run_zero(pool, config, variant.processes, steps)[0]


def assert_equal(a: Outcome, b: Outcome) -> None:
    assert a.updates == b.updates
    assert a.values.keys() == b.values.keys()
    for name, tensor in a.values.items():
        assert torch.equal(tensor, b.values[name]), name
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.full_matrix) for turn in (1, 2, 3))])
def test_dp_4_to_2_to_3_to_1_through_every_stage(pool: ProcessPool, tmp_path: Path, turn: int) -> None:
    """Each chain begins with another stage, and each change of ranks is also one of stage."""
    stages = [STRATEGIES[(turn + step) % 4] for step in range(4)]
    truth = pass_on(pool, Variant(dp=4, sharding=stages[0]), load=None, save=tmp_path / "0", steps=1)
    assert truth.updates == 1
    for number, (ranks, stage) in enumerate(zip((2, 3, 1), stages[1:], strict=True)):
        variant = Variant(dp=ranks, sharding=stage if ranks > 1 else "no_shard")
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        assert_equal(pass_on(pool, variant, load=load, save=save), truth)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((0, 3, 1, 2, 0), id="once"),
        pytest.param((0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0), id="all twelve pairs", marks=pytest.mark.full_matrix),
    ],
)
def test_every_stage_reads_another(pool: ProcessPool, tmp_path: Path, order: tuple[int, ...]) -> None:
    """A walk over the stages; what each read it passes on."""
    walk = [STRATEGIES[number] for number in order]
    truth = pass_on(pool, Variant(dp=2, sharding=walk[0]), load=None, save=tmp_path / "0", steps=1)
    for number, stage in enumerate(walk[1:]):
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        assert_equal(pass_on(pool, Variant(dp=2, sharding=stage), load=load, save=save), truth)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full_matrix)])
def test_tp_2_dp_2_and_stages_to_one_process_and_back(pool: ProcessPool, tmp_path: Path, pp: int) -> None:
    wide = Variant(tp=2, pp=pp, dp=2, schedule="1f1b", sharding="optim_grads_params")
    truth = pass_on(pool, wide, load=None, save=tmp_path / "0", steps=1)
    assert_equal(pass_on(pool, Variant(), load=tmp_path / "0", save=tmp_path / "1"), truth)
    assert_equal(pass_on(pool, wide, load=tmp_path / "1", save=tmp_path / "2"), truth)


CHAIN = [
    Variant(tp=2, pp=2, dp=2, schedule="1f1b", sharding="optim"),
    Variant(),
    Variant(tp=4, dp=2, sharding="optim_grads_params"),
    Variant(pp=2, chunks=2, dp=4, schedule="interleaved", sharding="optim_grads"),
    Variant(tp=2, pp=2, dp=2, schedule="1f1b", sharding="optim"),
]


@pytest.mark.full_matrix
@pytest.mark.parametrize("background", [False, True])
def test_eight_ranks_of_every_kind_read_each_others(pool: ProcessPool, tmp_path: Path, background: bool) -> None:
    truth = pass_on(pool, CHAIN[0], load=None, save=tmp_path / "0", steps=1, background=background, batch=8)
    for number, variant in enumerate(CHAIN[1:]):
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        assert_equal(pass_on(pool, variant, load=load, save=save, background=background, batch=8), truth)


lean_states = pytest.mark.parametrize(
    "states", [*(pytest.param(name, marks=pytest.mark.full_matrix) for name in LEAN if name != "fp8"), "fp8"]
)


@pytest.mark.slow
@lean_states
def test_lean_states_survive_and_a_resumed_run_is_the_same_bit_by_bit(
    pool: ProcessPool, tmp_path: Path, states: str
) -> None:
    wide, one = Variant(tp=2, dp=2, sharding="optim_grads"), Variant()
    half = pass_on(pool, wide, load=None, save=tmp_path / "half", steps=2, states=states)
    assert_equal(pass_on(pool, one, load=tmp_path / "half", save=tmp_path / "one", states=states), half)
    assert_equal(pass_on(pool, wide, load=tmp_path / "one", save=tmp_path / "back", states=states), half)
    straight = pass_on(pool, wide, load=None, save=tmp_path / "straight", steps=4, states=states)
    resumed = pass_on(pool, wide, load=tmp_path / "back", save=tmp_path / "resumed", steps=2, states=states)
    assert_equal(resumed, straight)


@lean_states
def test_lean_and_wide_states_read_each_other(pool: ProcessPool, tmp_path: Path, states: str) -> None:
    """A wide run takes a lean one's numbers as they are, so they come back unchanged; the first rounds its own."""
    one = Variant()
    wide = pass_on(pool, one, load=None, save=tmp_path / "wide", steps=2)
    lean = pass_on(pool, one, load=tmp_path / "wide", save=tmp_path / "lean", states=states)
    again = pass_on(pool, one, load=tmp_path / "lean", save=tmp_path / "again")
    assert_equal(pass_on(pool, one, load=tmp_path / "again", save=tmp_path / "back", states=states), lean)
    spacing = {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3}[states]
    for name, tensor in lean.values.items():
        assert torch.equal(again.values[name].to(tensor.dtype), tensor), name
        truth = wide.values[name].double()
        assert ((tensor.double() - truth).abs() <= spacing * truth.abs() + 2**-17 * truth.abs().max()).all(), name


def test_lean_states_read_those_of_other_formats(pool: ProcessPool, tmp_path: Path) -> None:
    """What a format can't hold is rounded to a neighbour."""
    last = pass_on(pool, Variant(), load=None, save=tmp_path / "0", steps=2, states="bf16")
    for number, states in enumerate(("fp16", "fp8", "bf16")):
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        read = pass_on(pool, Variant(), load=load, save=save, states=states)
        assert read.updates == 2
        for name, tensor in last.values.items():
            if name in read.values:  # main parameters may be the parameters themselves
                truth, numbers = tensor.double(), read.values[name].double()
                assert ((numbers - truth).abs() <= 2**-3 * truth.abs() + 2**-17 * truth.abs().max()).all(), name
        last = read


def test_a_step_after_a_change_of_stage_is_the_step_without_it(pool: ProcessPool, tmp_path: Path) -> None:
    straight = pass_on(pool, Variant(dp=2), load=None, save=tmp_path / "0", steps=2, bf16=False)
    half = pass_on(pool, Variant(dp=2), load=None, save=tmp_path / "1", steps=1, bf16=False)
    assert half.updates == 1
    rest = Variant(dp=2, sharding="optim")
    assert_equal(pass_on(pool, rest, load=tmp_path / "1", save=tmp_path / "2", steps=1, bf16=False), straight)
