"""The gradient norm: every logical parameter once, however it is cut, copied, tied or sharded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.distributed import random
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import GPTStage, units_of
from megalite.models.stages import StageSpan
from megalite.nn.module import named_specs
from megalite.optimizer.buckets import LARGE, build_buckets
from megalite.optimizer.gradient_norm import OwnedViews, combine, global_names
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.sharding import Sharding
from tests.helpers import FP32, FP64, LLAMA, data_mesh, tiny_model


def set_gradients(model: GPTStage) -> None:
    """Every logical gradient a function of name and place; what lies outside the boxes (padding) is huge."""
    for name, parameter, spec in named_specs(model):
        gradient: Tensor = parameter.gradient_sink.target()  # type: ignore[attr-defined]
        gradient.fill_(1e6)
        for box in spec.boxes:
            target = gradient[box.local_slices]
            random.fill_normal(target, random.fold(99, name), 1.0, spec.shape, box.global_start)
            if name.endswith("bias"):
                target.zero_()


Measures = tuple[float, dict[str, float], float, int]


def measures(mesh: Mesh, overrides: dict[str, Any], spans: list[StageSpan] | None) -> Measures:
    """Global norm, norms by name, parameter norm, zeros."""
    span = None if spans is None else spans[mesh.coordinates["pp"]]
    model = tiny_model(mesh, FP64, span=span, **overrides)
    optimizer = Optimizer(units_of([model]), mesh, FP64, OptimizerConfig())
    set_gradients(model)
    norm = optimizer.measure(loss_scale=2.0).grad_norm
    return norm, optimizer.gradient_norms(2.0), optimizer.parameter_norm(), optimizer.count_zeros()


def direct(overrides: dict[str, Any]) -> Measures:
    """The same by plain sums over the logical parameters of one process."""
    model = tiny_model(single_process_mesh(), FP64, **overrides)
    squares, parameter_squares, zeros = {}, 0.0, 0
    for name, parameter, spec in named_specs(model):
        gradient = torch.zeros(spec.shape, dtype=torch.float64)
        if not name.endswith("bias"):
            random.fill_normal(gradient, random.fold(99, name), 1.0, spec.shape, (0,) * len(spec.shape))
        zeros += int((gradient == 0).sum())
        squares[name] = gradient.square().sum().item() / 4.0
        (box,) = spec.boxes
        parameter_squares += parameter[box.local_slices].square().sum().item()
    norms = {name: math.sqrt(value) for name, value in squares.items()}
    return math.sqrt(math.fsum(squares.values())), norms, math.sqrt(parameter_squares), zeros


def check(results: list[Measures], overrides: dict[str, Any]) -> None:
    norm, norms, parameter_norm, zeros = direct(overrides)
    assert len({result[0] for result in results}) == 1
    for result in results:
        assert result[0] == pytest.approx(norm, rel=1e-13)
        assert result[1] == pytest.approx(norms, rel=1e-13)
        assert result[2] == pytest.approx(parameter_norm, rel=1e-13)
        assert result[3] == zeros


NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "padded vocabulary": {"make_vocab_size_divisible_by": 128},
    "llama with two groups": {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=2, dp=2), Layout(dp=3)], ids=str)
def test_cut_and_copied_parameters_count_once(pool: ProcessPool, network: str, layout: Layout) -> None:
    results = pool.run(measures, layout.world_size, NETWORKS[network], None, layout=layout)
    check(results, NETWORKS[network])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_tied_over_stages_counts_once(pool: ProcessPool, tied: bool, tp: int) -> None:
    count = 4 // tp
    overrides = {"num_layers": count, "untie_embeddings_and_output_weights": not tied}
    stages = (0, count - 1) if tied else None
    spans = [StageSpan(n, n + 1, n == 0, n == count - 1, stages) for n in range(count)]
    check(pool.run(measures, 4, overrides, spans, layout=Layout(pp=count, tp=tp)), overrides)


def _norm_with_nan_on_one_rank(mesh: Mesh, value: float) -> tuple[float, bool]:
    model = tiny_model(mesh, FP64, untie_embeddings_and_output_weights=True)
    optimizer = Optimizer(units_of([model]), mesh, FP64, OptimizerConfig())
    if mesh.rank == mesh.layout.world_size - 1:
        model.decoder.final_layernorm.weight.gradient_sink.target()[3] = value  # type: ignore[union-attr]
        model.decoder.layers["0"].mlp.linear_fc1.weight.gradient_sink.target()[0, 0] = value  # type: ignore[union-attr]
    optimizer.reduce_gradients()
    result = optimizer.measure(1.0)
    return result.grad_norm, result.finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(
    pool: ProcessPool, layout: Layout, value: float
) -> None:
    results = pool.run(_norm_with_nan_on_one_rank, layout.world_size, value, layout=layout)
    assert not any(finite for _, finite in results)
    assert not any(math.isfinite(norm) for norm, _ in results)


def test_the_sum_does_not_depend_on_the_order_and_is_not_a_number_where_a_part_is_not() -> None:
    squares = [1e16, 1.0, 1.0, 1e-8] * 100
    assert combine(squares) == combine(sorted(squares)) == math.sqrt(math.fsum(squares))
    assert math.isnan(combine([1.0, math.inf]))
    assert math.isnan(combine([math.nan, 1.0]))
    assert combine([]) == 0.0


ONE = single_process_mesh()
WIDE = {"hidden_size": 128, "ffn_hidden_size": 1100, "num_layers": 1}  # 140,800 elements: no multiple of a row


def squares_of_shards(how: Sharding, ranks: int) -> tuple[list[float], float]:
    """Sums of squares of the same gradients over all ranks of a layout without processes, and the exact total."""
    assert WIDE["hidden_size"] * WIDE["ffn_hidden_size"] >= LARGE
    names: list[str] = []
    totals: list[float] = []
    exact = 0.0
    for rank in range(ranks):
        mesh = data_mesh(Layout(dp=ranks), rank)
        buckets = build_buckets(units_of([tiny_model(mesh, FP32, **WIDE)]), mesh, FP32, how)
        names = global_names(buckets, ONE)
        for bucket in buckets:
            for piece in bucket.pieces(bucket.held_grads):
                generator = torch.Generator().manual_seed(len(piece.name))
                whole = torch.randn(math.prod(piece.spec.local_shape), generator=generator)
                piece.flat.copy_(whole[piece.start : piece.start + piece.flat.numel()])
                exact += piece.flat.double().square().sum().item()
        pieces = [piece for bucket in buckets for piece in bucket.pieces(bucket.held_grads)]
        mesh.world = ONE.world  # nothing is exchanged
        mine = OwnedViews(pieces, names, mesh, FP32.wide).squares()
        totals = mine if not totals else [a + b for a, b in zip(totals, mine, strict=True)]
    return totals, exact


def test_rows_of_large_parameters_are_precise_far_beyond_fp32() -> None:
    totals, exact = squares_of_shards(Sharding(), 1)
    assert math.fsum(totals) == pytest.approx(exact, rel=5e-8)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [None, 1, 200_000])
def test_shards_sum_the_same_rows(ranks: int, size: int | None) -> None:
    whole, _ = squares_of_shards(Sharding(), 1)
    shared, _ = squares_of_shards(Sharding(state=True, bucket_size=size), ranks)
    assert shared == pytest.approx(whole, rel=1e-13)
