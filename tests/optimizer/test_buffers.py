"""Contiguous buffers: what lies in them, where gradients arrive, and their reduction over data-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import plain_info
from megalite.nn.module import named_specs
from megalite.optimizer.buffers import ALIGNMENT, FlatBuffer, build_buffers
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, tiny_model, tiny_tokens

MESH = single_process_mesh()
TEXT = tiny_tokens(2, 16)
BF16_REDUCTION = Precision.from_config(PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))


def test_parameters_keep_their_values_and_become_aligned_views_of_the_buffer() -> None:
    model = tiny_model(MESH, FP32)
    before = {name: parameter.detach().clone() for name, parameter, _ in named_specs(model)}
    buffers = build_buffers(named_specs(model), MESH, FP32)
    for buffer in buffers:
        end = 0
        for slot in buffer.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.start >= end
            end = slot.start + slot.parameter.numel()
            assert torch.equal(slot.parameter, before[slot.name])
            offset = slot.parameter.data_ptr() - buffer.params.data_ptr()
            assert offset == slot.start * buffer.params.element_size()
        assert end <= buffer.params.numel()
    assert {slot.name for buffer in buffers for slot in buffer.slots} == before.keys()


def test_a_buffer_holds_parameters_that_are_treated_alike() -> None:
    for buffer in build_buffers(named_specs(tiny_model(MESH, FP32)), MESH, FP32):
        treatments = {(slot.spec.weight_decay, slot.spec.lr_group) for slot in buffer.slots}
        assert treatments == {(buffer.weight_decay, buffer.lr_group)}


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_model(MESH, FP32)
    for name, parameter, _ in named_specs(model):
        parameter.requires_grad_("layernorm" in name)
    names = {slot.name for buffer in build_buffers(named_specs(model), MESH, FP32) for slot in buffer.slots}
    assert names == {name for name, _, _ in named_specs(model) if "layernorm" in name}


@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_arrives_in_the_main_gradients_and_adds_up_over_microbatches(tied: bool) -> None:
    overrides = {"untie_embeddings_and_output_weights": not tied}
    model, plain = (tiny_model(MESH, FP64, **overrides) for _ in range(2))
    build_buffers(named_specs(model), MESH, FP64)
    for microbatch in range(3):
        text = tiny_tokens(2, 16, seed=microbatch)
        for each in (model, plain):
            hidden = each(text[:, :-1], plain_info(text[:, :-1]))
            each.token_losses(hidden, text[:, 1:]).mean().backward()
    for (name, ours, _), (_, theirs, _) in zip(named_specs(model), named_specs(plain), strict=True):
        assert ours.grad is None
        assert torch.allclose(ours.main_grad, theirs.grad, rtol=1e-12, atol=1e-15), name  # type: ignore[attr-defined]


def test_half_precision_gradients_of_norms_and_biases_add_up_in_fp32() -> None:
    model = tiny_model(MESH, BF16)
    build_buffers(named_specs(model), MESH, BF16)
    assert model.decoder.final_layernorm is not None
    bias = model.decoder.final_layernorm.bias
    for _ in range(600):
        (bias * torch.ones(32, dtype=torch.bfloat16)).sum().backward()
    assert bias.main_grad.dtype == torch.float32
    assert (bias.main_grad == 600.0).all()


def test_half_precision_parameters_have_wide_main_copies_and_wide_ones_none() -> None:
    for buffer in build_buffers(named_specs(tiny_model(MESH, BF16)), MESH, BF16):
        assert buffer.params.dtype == torch.bfloat16
        assert buffer.main.dtype == buffer.grads.dtype == torch.float32
        assert torch.equal(buffer.main, buffer.params.to(torch.float32))
    for buffer in build_buffers(named_specs(tiny_model(MESH, FP32)), MESH, FP32):
        assert buffer.main is buffer.params


def _reduced(mesh: Mesh, precision: Precision) -> tuple[list[Tensor], list[Tensor]]:
    """The buffers' gradients before and after the reduction."""
    buffers: list[FlatBuffer] = build_buffers(named_specs(tiny_model(mesh, precision)), mesh, precision)
    generator = torch.Generator().manual_seed(mesh.rank)
    for buffer in buffers:
        buffer.grads.copy_(torch.randn(buffer.grads.shape, generator=generator, dtype=torch.float64) * 10**mesh.rank)
    before = [buffer.grads.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.reduce()
    return before, [buffer.grads for buffer in buffers]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=4), Layout(dp=2, cp=2), Layout(dp=2, tp=2)], ids=str)
def test_gradients_are_summed_over_the_ranks_that_hold_the_same_parameters(pool: ProcessPool, layout: Layout) -> None:
    results = pool.run(_reduced, layout.world_size, FP64, layout=layout)
    for rank, (_, after) in enumerate(results):
        copies = layout.group_of(rank, "dp", "cp")
        for i, reduced in enumerate(after):
            expected = torch.stack([results[copy][0][i] for copy in copies]).sum(0)
            assert torch.allclose(reduced, expected, rtol=1e-14, atol=1e-13)
        assert all(torch.equal(a, b) for a, b in zip(after, results[copies[0]][1], strict=True))


def test_a_reduction_in_bf16_sums_rounded_gradients_and_one_in_fp32_does_not(pool: ProcessPool) -> None:
    layout = Layout(dp=2)
    for before, after in pool.run(_reduced, 2, BF16_REDUCTION, layout=layout):
        assert all(reduced.dtype == torch.float32 for reduced in after)
        assert all(torch.equal(reduced, reduced.bfloat16().to(torch.float32)) for reduced in after)
        assert len(before) == len(after)
    results = pool.run(_reduced, 2, BF16, layout=layout)
    for _, after in results:
        for i, reduced in enumerate(after):
            assert torch.allclose(reduced, results[0][0][i] + results[1][0][i], rtol=1e-6, atol=1e-6)
