"""Buckets: what lies in them and where, and that every gradient arrives."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megalite.config.schema import OptimizerConfig, PrecisionConfig
from megalite.distributed.layout import DENSE, Domain, Layout
from megalite.distributed.mesh import GROUP_AXES, Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec, Place, replicated
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import GPTStage, plain_tokens, units_of
from megalite.models.stages import StageSpan
from megalite.nn.module import named_specs
from megalite.optimizer.buckets import ALIGNMENT, Bucket, build_buckets
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.sharding import Sharding, Unit
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, PRELOADED, data_mesh, tiny_model, tiny_tokens

MESH = single_process_mesh()
BF16_REDUCTION = Precision.from_config(PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))
WHOLE = Sharding()


def buckets_of(model: GPTStage, precision: Precision, how: Sharding = WHOLE, mesh: Mesh = MESH) -> list[Bucket]:
    return build_buckets(units_of([model]), mesh, precision, how)


def test_parameters_keep_their_values_and_become_aligned_views_of_their_bucket() -> None:
    model = tiny_model(MESH, FP32)
    model.decoder.layers["0"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p, _ in named_specs(model) if p.requires_grad}
    buckets = buckets_of(model, FP32, Sharding(bucket_size=5000))
    assert len(buckets) > 2
    for bucket in buckets:
        for slot, following in itertools.zip_longest(bucket.slots, bucket.slots[1:]):
            assert slot.start % ALIGNMENT == 0
            assert slot.stop <= (bucket.size if following is None else following.start)
            assert torch.equal(slot.parameter, before.pop(slot.name))
            offset = slot.parameter.data_ptr() - bucket.params.data_ptr()
            assert offset == slot.start * bucket.params.element_size()
    assert not before, "each that is trained is in a bucket"


def test_runs_of_one_treatment_cover_the_held_range() -> None:
    model = tiny_model(MESH, FP32, untie_embeddings_and_output_weights=True)
    for bucket in buckets_of(model, FP32):
        runs = list(bucket.treatment_runs())
        assert [start for _, start, _ in runs] == [0, *(stop for _, _, stop in runs[:-1])]
        assert runs[-1][2] == bucket.size
        for treatment, start, stop in runs:
            assert {s.spec.treatment for s in bucket.slots if start <= s.start < stop} == {treatment}


def test_later_parameters_are_in_earlier_buckets() -> None:
    model = tiny_model(MESH, FP32, untie_embeddings_and_output_weights=True)
    buckets = buckets_of(model, FP32, Sharding(bucket_size=1))
    assert [slot.name for bucket in buckets for slot in bucket.slots] == [
        name for unit in reversed(units_of([model])) for name, _, _ in reversed(unit.members)
    ]
    assert [bucket.first_unit for bucket in buckets] == sorted((b.first_unit for b in buckets), reverse=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_equal_and_together_are_the_bucket(ranks: int) -> None:
    held = []
    for rank in range(ranks):
        mesh = data_mesh(Layout(dp=ranks), rank)
        held.append(buckets_of(tiny_model(mesh, FP32), FP32, Sharding(state=True, bucket_size=5000), mesh))
    for shards in zip(*held, strict=True):
        assert [bucket.first for bucket in shards] == [i * shards[0].size // ranks for i in range(ranks)]
        assert shards[-1].last == shards[0].size
        assert all(bucket.held_params.numel() == bucket.last - bucket.first for bucket in shards)
        assert all((bucket.last - bucket.first) % ALIGNMENT == 0 for bucket in shards)


def test_a_table_on_two_stages_has_a_bucket_of_its_own_that_is_equal_on_both() -> None:
    layout = Layout(pp=2, dp=2)
    tables = []
    for stage in (0, 1):
        mesh = data_mesh(layout, layout.rank_at(pp=stage))
        span = StageSpan(stage, stage + 1, stage == 0, stage == 1, tied_stages=(0, 1))
        buckets = buckets_of(tiny_model(mesh, FP32, span=span), FP32, Sharding(state=True), mesh)
        tables += [b for b in buckets if any("word_embeddings" in slot.name for slot in b.slots)]
    assert [[slot.name for slot in b.slots] for b in tables] == 2 * [["embedding.word_embeddings.weight"]]
    assert tables[0].size == tables[1].size


@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_arrives_and_adds_up_over_microbatches(tied: bool) -> None:
    overrides = {"untie_embeddings_and_output_weights": not tied}
    model, plain = (tiny_model(MESH, FP64, **overrides) for _ in range(2))
    optimizer = Optimizer(units_of([model]), MESH, FP64, OptimizerConfig(), Sharding(bucket_size=5000))
    optimizer.begin_step(3)
    for microbatch in range(3):
        text = tiny_tokens(2, 16, seed=microbatch)
        for each in (model, plain):
            hidden = each(text[:, :-1], plain_tokens(text[:, :-1]))
            each.loss(hidden, text[:, 1:]).total.backward()
    for (name, ours, _), (_, theirs, _) in zip(named_specs(model), named_specs(plain), strict=True):
        assert ours.grad is None
        main: Tensor = ours.gradient_sink.target()  # type: ignore[attr-defined]
        assert torch.allclose(main, theirs.grad, rtol=1e-12, atol=1e-15), name


def _bucket_numbers_at_their_start(mesh: Mesh, sharded: bool, deferred: bool) -> list[list[int]]:
    """Of two microbatches, the buckets in the order in which their reductions start, when they must be complete."""
    plain, model = (tiny_model(mesh, FP64, num_layers=3) for _ in range(2))
    how = Sharding(state=True, gradients=sharded, overlap_reduce=True, bucket_size=5000)
    optimizer = Optimizer(units_of([model]), mesh, FP64, OptimizerConfig(), how)
    layer = model.decoder.layers["1"].mlp.linear_fc2
    layer.bias = nn.Parameter(layer.bias.detach().clone())  # the one in a bucket isn't used
    started: list[tuple[Bucket, Tensor]] = []
    reduce = optimizer.reducer._reduce

    def spy(bucket: Bucket) -> object:
        started.append((bucket, optimizer.reducer.whole_gradients(bucket).clone()))
        return reduce(bucket)

    optimizer.reducer._reduce = spy  # type: ignore[method-assign, assignment]
    optimizer.begin_step(2)
    numbers = []
    for microbatch in range(2):
        text = tiny_tokens(2, 16, seed=microbatch)
        if sharded:
            plain.zero_grad()
        model.weight_gradients.deferred = deferred
        for each in (plain, model):
            each.loss(each(text[:, :-1], plain_tokens(text[:, :-1])), text[:, 1:]).total.backward()
        meanwhile = len(started)
        for job in model.weight_gradients.take():
            job()
        optimizer.backward_ended(0)
        of_embedding = sum(bucket.first_unit == 0 for bucket, _ in started)
        assert meanwhile == (0 if deferred else len(started) - of_embedding), "the others' overlap with the backward"
        for bucket, gradients in started:
            for slot in bucket.slots:
                expected = plain.get_parameter(slot.name).grad
                if slot.parameter is not model.get_parameter(slot.name):
                    expected = torch.zeros_like(expected)
                assert torch.allclose(slot.view(gradients), expected, rtol=1e-10), slot.name
        numbers.append([bucket.number for bucket, _ in started])
        started.clear()
    optimizer.reducer.finish()
    return numbers


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "weight gradients later"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole gradients", "sharded gradients"])
def test_a_reduction_starts_once_its_units_are_through_though_a_parameter_is_unused(
    pool: ProcessPool, sharded: bool, deferred: bool
) -> None:
    first, second = pool.run(_bucket_numbers_at_their_start, 2, sharded, deferred, layout=Layout(dp=2))
    assert first == second, "in one order on all ranks"
    every = list(range(len(first[1])))
    assert len(every) > 4 and first == [every if sharded else [], every]


def test_half_precision_gradients_of_norms_and_biases_add_up_in_fp32() -> None:
    model = tiny_model(MESH, BF16)
    Optimizer(units_of([model]), MESH, BF16, OptimizerConfig()).begin_step(600)
    bias = model.decoder.final_layernorm.bias
    for _ in range(600):
        (bias * torch.ones(32, dtype=torch.bfloat16)).sum().backward()
    main: Tensor = bias.gradient_sink.target()  # type: ignore[union-attr]
    assert main.dtype == torch.float32
    assert (main == 600.0).all()


def test_half_precision_parameters_have_wide_main_copies_and_wide_ones_none() -> None:
    for precision, copies in ((BF16, True), (FP32, False)):
        optimizer = Optimizer(units_of([tiny_model(MESH, precision)]), MESH, precision, OptimizerConfig())
        for segment in optimizer.segments:
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
        bucket.grads.copy_(torch.randn(bucket.size, generator=generator, dtype=torch.float64) * 10**mesh.rank)
        before.append(bucket.grads.clone())
    optimizer.reducer.finish()
    return before, [b.held_grads for b in optimizer.buckets], [b.first for b in optimizer.buckets]


@pytest.mark.parametrize("state", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(dp=2, cp=2), Layout(dp=2, tp=2)], ids=str)
def test_gradients_are_summed_over_the_ranks_that_hold_the_same_parameters(
    pool: ProcessPool, layout: Layout, state: bool
) -> None:
    results = pool.run(_reduced, layout.world_size, FP64, Sharding(state=state), layout=layout)
    for rank, (_, after, starts) in enumerate(results):
        copies = layout.group_of(rank, "dp", "cp")
        for i, (reduced, start) in enumerate(zip(after, starts, strict=True)):
            expected = torch.stack([results[copy][0][i] for copy in copies]).sum(0)[start : start + len(reduced)]
            assert torch.allclose(reduced, expected, rtol=1e-14, atol=1e-13)


EXPERT = Domain(data_axes=("edp",), model_axes=("pp", "ep", "etp"), tensor_axis="etp")


def _step_of_two_domains(mesh: Mesh, how: Sharding) -> tuple[dict[str, float], dict[str, float]]:
    """Norms by name of a parameter and an expert's, after gradients of 10^rank, and the values of those held here after
    a step."""
    members = []
    for name, domain in (("dense", DENSE), (f"expert {mesh.coordinates['ep']}", EXPERT)):
        boxes = replicated((512,), Place(mesh.layout, mesh.rank, None, domain))
        spec = ParamSpec((512,), (512,), boxes, domain=domain)
        members.append((name, nn.Parameter(torch.zeros(512, dtype=torch.float64)), spec))
    unit = Unit(nn.Identity(), 0, members, lambda job: job())
    optimizer = Optimizer([unit], mesh, FP64, OptimizerConfig(optimizer="sgd", clip_grad=0.0), how)
    optimizer.begin_step(1)
    for _, parameter, _ in members:
        parameter.gradient_sink.target().fill_(10.0**mesh.rank)  # type: ignore[attr-defined]
    optimizer.backward_ended(0)
    optimizer.reduce_gradients()
    optimizer.step(optimizer.measure(1.0), lr=1.0, decoupled_lr=1.0, weight_decay=0.0, loss_scale=1.0)
    values = {name: piece.flat.unique().item() for name, piece in optimizer.parameter_pieces().items()}
    return optimizer.gradient_norms(1.0), values


def _steps_of_two_domains(strategies: list[Sharding]) -> list[tuple[dict[str, float], dict[str, float]]]:
    with ExitStack() as stack:
        for module in ("optimizer.optimizer", "optimizer.gradient_norm", "distributed.mesh"):
            stack.enter_context(mock.patch(f"megalite.{module}.DOMAINS", (DENSE, EXPERT)))
        axes = (*GROUP_AXES, EXPERT.data_axes, EXPERT.model_axes)
        stack.enter_context(mock.patch("megalite.distributed.mesh.GROUP_AXES", axes))
        timeout = timedelta(seconds=60)
        mesh = Mesh.create(Layout(dp=4, ep=2), torch.device("cpu"), backend="gloo", timeout=timeout)
        results = [_step_of_two_domains(mesh, how) for how in strategies]
        mesh.close()
        return results


def test_each_domain_is_reduced_and_sharded_over_its_own_ranks() -> None:
    """Of four data ranks, ranks 0 and 2 have one expert, 1 and 3 another."""
    strategies = [Sharding(state=n > 0, gradients=n > 1, parameters=n > 2) for n in range(4)]
    root = 512**0.5
    with ProcessPool(4, preload=PRELOADED) as workers:
        for rank, results in enumerate(workers.run(_steps_of_two_domains, 4, strategies)):
            for norms, values in results:
                assert norms == pytest.approx({"dense": 1111 * root, "expert 0": 101 * root, "expert 1": 1010 * root})
                assert values == {"dense": -1111.0, f"expert {rank % 2}": [-101.0, -1010.0][rank % 2]}


def test_a_reduction_in_bf16_sums_rounded_gradients_and_one_in_fp32_does_not(pool: ProcessPool) -> None:
    layout = Layout(dp=2)
    for _, after, _ in pool.run(_reduced, 2, BF16_REDUCTION, WHOLE, layout=layout):
        assert all(reduced.dtype == torch.float32 for reduced in after)
        assert all(torch.equal(reduced, reduced.bfloat16().to(torch.float32)) for reduced in after)
    results = pool.run(_reduced, 2, BF16, WHOLE, layout=layout)
    for _, after, _ in results:
        for i, reduced in enumerate(after):
            assert torch.allclose(reduced, results[0][0][i] + results[1][0][i], rtol=1e-6, atol=1e-6)
