"""Buckets: what lies in them and where, and that every gradient arrives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig, PrecisionConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import GPTStage, plain_info, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.buckets import ALIGNMENT, Bucket, build_buckets
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.sharding import Sharding
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, data_mesh, tiny_model, tiny_tokens

MESH = single_process_mesh()
BF16_REDUCTION = Precision.from_config(PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))
WHOLE = Sharding()


def buckets_of(model: GPTStage, precision: Precision, how: Sharding = WHOLE, mesh: Mesh = MESH) -> list[Bucket]:
    return build_buckets(units_of([model]), mesh, precision, how)


def test_parameters_keep_their_values_and_become_aligned_views_of_their_bucket() -> None:
    model = tiny_model(MESH, FP32)
    before = {name: parameter.detach().clone() for name, parameter, _ in named_specs(model)}
    buckets = buckets_of(model, FP32, Sharding(bucket_size=5000))
    assert len(buckets) > 2
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.start >= end
            end = slot.stop
            assert torch.equal(slot.parameter, before[slot.name])
            offset = slot.parameter.data_ptr() - bucket.params.data_ptr()
            assert offset == slot.start * bucket.params.element_size()
        assert end <= bucket.size
    assert {slot.name for bucket in buckets for slot in bucket.slots} == before.keys()


def test_segments_are_treated_alike_and_cover_the_held_range() -> None:
    model = tiny_model(MESH, FP32, untie_embeddings_and_output_weights=True)
    for bucket in buckets_of(model, FP32):
        ends = [0]
        for treatment, start, stop in bucket.segments():
            assert start == ends[-1]
            ends.append(stop)
            inside = {slot.treatment for slot in bucket.slots if start <= slot.start < stop}
            assert inside == {treatment}
        assert ends[-1] == bucket.size


def test_later_parameters_are_in_earlier_buckets() -> None:
    model = tiny_model(MESH, FP32, untie_embeddings_and_output_weights=True)
    order = [slot.name for bucket in buckets_of(model, FP32, Sharding(bucket_size=1)) for slot in bucket.slots]
    names = [name for name, _, _ in named_specs(model)]
    assert order[0] == "output_layer.weight"
    assert order.index("decoder.layers.1.mlp.linear_fc2.weight") < order.index("decoder.layers.1.mlp.linear_fc1.weight")
    assert order[-1] == names[0] == "embedding.word_embeddings.weight"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_equal_and_together_are_the_bucket(ranks: int) -> None:
    layout = Layout(dp=ranks)
    held = []
    for rank in range(ranks):
        mesh = data_mesh(layout, rank)
        held.append(buckets_of(tiny_model(mesh, FP32), FP32, Sharding(state=True, bucket_size=5000), mesh))
    for shards in zip(*held, strict=True):
        assert [bucket.first for bucket in shards] == [i * shards[0].size // ranks for i in range(ranks)]
        assert shards[-1].last == shards[0].size
        assert all(bucket.held_params.numel() == bucket.last - bucket.first for bucket in shards)
        assert all((bucket.last - bucket.first) % ALIGNMENT == 0 for bucket in shards)


def test_a_table_on_two_stages_has_a_bucket_of_its_own_that_is_equal_on_both() -> None:
    layout = Layout(pp=2, dp=2)
    from megalite.models.stages import StageSpan

    tables = []
    for rank in (0, layout.rank_at(pp=1, tp=0, dp=0, cp=0)):
        mesh = data_mesh(layout, rank)
        span = (
            StageSpan(0, 1, has_embedding=True, has_output=False, tied_stages=(0, 1))
            if rank == 0
            else StageSpan(1, 2, has_embedding=False, has_output=True, tied_stages=(0, 1))
        )
        buckets = buckets_of(tiny_model(mesh, FP32, span=span), FP32, Sharding(state=True), mesh)
        tables.append([b for b in buckets if any("word_embeddings" in slot.name for slot in b.slots)])
    for ours in tables:
        assert [[slot.name for slot in bucket.slots] for bucket in ours] == [["embedding.word_embeddings.weight"]]
    assert tables[0][0].size == tables[1][0].size


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_model(MESH, FP32)
    for name, parameter, _ in named_specs(model):
        parameter.requires_grad_("layernorm" in name)
    names = {slot.name for bucket in buckets_of(model, FP32) for slot in bucket.slots}
    assert names == {name for name, _, _ in named_specs(model) if "layernorm" in name}


@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_arrives_and_adds_up_over_microbatches(tied: bool) -> None:
    overrides = {"untie_embeddings_and_output_weights": not tied}
    model, plain = (tiny_model(MESH, FP64, **overrides) for _ in range(2))
    optimizer = Optimizer(units_of([model]), MESH, FP64, OptimizerConfig(), Sharding(bucket_size=5000))
    optimizer.begin_step(3)
    for microbatch in range(3):
        text = tiny_tokens(2, 16, seed=microbatch)
        for each in (model, plain):
            hidden = each(text[:, :-1], plain_info(text[:, :-1]))
            each.token_losses(hidden, text[:, 1:]).mean().backward()
    states = optimizer.reducer._states
    assert all(state.missing == [0] * len(state.missing) for state in states), "each counted as often as it came"
    for (name, ours, _), (_, theirs, _) in zip(named_specs(model), named_specs(plain), strict=True):
        assert ours.grad is None
        main: Tensor = ours.gradient_sink.target()  # type: ignore[attr-defined]
        assert torch.allclose(main, theirs.grad, rtol=1e-12, atol=1e-15), name


def test_half_precision_gradients_of_norms_and_biases_add_up_in_fp32() -> None:
    model = tiny_model(MESH, BF16)
    Optimizer(units_of([model]), MESH, BF16, OptimizerConfig()).begin_step(600)
    assert model.decoder.final_layernorm is not None
    bias = model.decoder.final_layernorm.bias
    for _ in range(600):
        (bias * torch.ones(32, dtype=torch.bfloat16)).sum().backward()
    main: Tensor = bias.gradient_sink.target()  # type: ignore[union-attr]
    assert main.dtype == torch.float32
    assert (main == 600.0).all()


def test_half_precision_parameters_have_wide_main_copies_and_wide_ones_none() -> None:
    for precision, copies in ((BF16, True), (FP32, False)):
        optimizer = Optimizer(units_of([tiny_model(MESH, precision)]), MESH, precision, OptimizerConfig())
        for segment in optimizer.updater.segments:
            assert segment.is_copy == copies
            assert segment.main.dtype == segment.gradient.dtype == torch.float32
            assert torch.equal(segment.main, segment.parameters.to(torch.float32))


def _reduced(mesh: Mesh, precision: Precision, how: Sharding) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The gradients before and after the reduction, and where the held range begins."""
    optimizer = Optimizer(units_of([tiny_model(mesh, precision)]), mesh, precision, OptimizerConfig(), how)
    generator = torch.Generator().manual_seed(mesh.rank)
    optimizer.begin_step(1)
    before = []
    for bucket in optimizer.buckets:
        assert bucket.grads is not None
        bucket.grads.copy_(torch.randn(bucket.size, generator=generator, dtype=torch.float64) * 10**mesh.rank)
        before.append(bucket.grads.clone())
    optimizer.reducer.finish()
    return before, [b.held_grads for b in optimizer.buckets], [b.first for b in optimizer.buckets]


@pytest.mark.parametrize("state", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=3), Layout(dp=2, cp=2), Layout(dp=2, tp=2)], ids=str)
def test_gradients_are_summed_over_the_ranks_that_hold_the_same_parameters(
    pool: ProcessPool, layout: Layout, state: bool
) -> None:
    results = pool.run(_reduced, layout.world_size, FP64, Sharding(state=state), layout=layout)
    for rank, (_, after, starts) in enumerate(results):
        copies = layout.group_of(rank, "dp", "cp")
        for i, (reduced, start) in enumerate(zip(after, starts, strict=True)):
            expected = torch.stack([results[copy][0][i] for copy in copies]).sum(0)[start : start + len(reduced)]
            assert torch.allclose(reduced, expected, rtol=1e-14, atol=1e-13)


def test_a_reduction_in_bf16_sums_rounded_gradients_and_one_in_fp32_does_not(pool: ProcessPool) -> None:
    layout = Layout(dp=2)
    for _, after, _ in pool.run(_reduced, 2, BF16_REDUCTION, WHOLE, layout=layout):
        assert all(reduced.dtype == torch.float32 for reduced in after)
        assert all(torch.equal(reduced, reduced.bfloat16().to(torch.float32)) for reduced in after)
    results = pool.run(_reduced, 2, BF16, WHOLE, layout=layout)
    for _, after, _ in results:
        for i, reduced in enumerate(after):
            assert torch.allclose(reduced, results[0][0][i] + results[1][0][i], rtol=1e-6, atol=1e-6)
