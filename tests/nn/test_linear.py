"""Linear layers against autograd, and where their weight's gradient goes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.linear import linear
from megalite.nn.mlp import MLP
from megalite.nn.module import initialize
from tests.helpers import FixedSink, tiny_build

DOUBLE = torch.float64


def with_main_grad(weight: torch.Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(weight)
    parameter.gradient_sink = FixedSink(torch.zeros(weight.shape, dtype=dtype))  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_the_product_and_both_gradients_are_those_of_the_flattened_matrix(shape: tuple[int, ...]) -> None:
    x = torch.randn(3, 2, 4, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    assert torch.allclose(linear(x, weight), F.linear(x, weight.view(-1, 4)), atol=1e-14)
    assert torch.autograd.gradcheck(linear, (x, weight))


def test_only_the_gradients_asked_for_are_computed() -> None:
    x, weight = torch.randn(3, 4, dtype=DOUBLE), torch.randn(5, 4, dtype=DOUBLE, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    frozen = weight.detach()
    y = linear(x.requires_grad_(), frozen)
    y.sum().backward()
    assert torch.allclose(x.grad, frozen.sum(0).expand(3, 4))


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_the_main_gradient_gets_the_sum_over_backwards_and_grad_stays_empty(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=DOUBLE)
    ours, plain = with_main_grad(values.clone(), DOUBLE), torch.nn.Parameter(values.clone())
    for _ in range(3):
        x, cotangent = torch.randn(5, 2, 4, dtype=DOUBLE), torch.randn(5, 2, 6, dtype=DOUBLE)
        our_x, plain_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        linear(our_x, ours).backward(cotangent)
        F.linear(plain_x, plain.view(6, 4)).backward(cotangent)
        assert torch.allclose(our_x.grad, plain_x.grad, atol=1e-13)
    assert ours.grad is None
    assert torch.allclose(ours.gradient_sink.target(), plain.grad, atol=1e-13)


def test_half_precision_gradients_are_summed_in_the_wide_main_gradient() -> None:
    """In bf16 the sum of ones stops at 256."""
    weight = with_main_grad(torch.zeros(1, 2, dtype=torch.bfloat16), torch.float32)
    x = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    for _ in range(1000):
        linear(x, weight).sum().backward()
    assert torch.equal(weight.gradient_sink.target(), torch.tensor([[1000.0, 500.0]]))


def test_a_half_precision_contribution_has_at_most_one_rounding_more_than_the_wide_one() -> None:
    x, cotangent = torch.randn(64, 8).bfloat16(), torch.randn(64, 6).bfloat16()
    weight = with_main_grad(torch.zeros(6, 8, dtype=torch.bfloat16), torch.float32)
    linear(x, weight).backward(cotangent)
    exact = cotangent.double().t() @ x.double()
    assert ((weight.gradient_sink.target().double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def _waiting_gradients(mesh: Mesh) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the waiting weight gradients of a feed-forward block hold on this rank; then those gradients."""
    build = tiny_build(mesh=mesh, add_bias_linear=False, squared_relu=True)
    block = MLP(build)
    initialize(block, 0)
    for weight in block.parameters():
        weight.gradient_sink = FixedSink(torch.zeros_like(weight))  # type: ignore[attr-defined]
    x = torch.randn(8, 2, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).chunk(mesh.tp.size)[
        mesh.tp.rank
    ]
    build.weight_gradients.deferred = True
    block(x.clone().requires_grad_()).square().sum().backward()
    jobs = build.weight_gradients.take()
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for job in jobs
        for kept in job.args[1:]  # type: ignore[attr-defined]
        for part in kept
    }
    assert all((weight.gradient_sink.target() == 0).all() for weight in block.parameters())
    for job in jobs:
        job()
    return sum(storages.values()), [weight.gradient_sink.target() for weight in block.parameters()]


def test_weight_gradients_that_wait_hold_a_ranks_own_part_of_the_sequence(pool: ProcessPool) -> None:
    held, (first, second) = _waiting_gradients(single_process_mesh())
    assert held == 8 * 2 * (2 * 32 + 2 * 128) * 8  # inputs and gradients of both layers in float64
    results = pool.run(_waiting_gradients, 2, layout=Layout(tp=2, sequence_parallel=True))
    for rank, (part, (up, down)) in enumerate(results):
        assert part == held / 2
        assert torch.allclose(up, first.chunk(2)[rank], rtol=1e-12)
        assert torch.allclose(down, second.chunk(2, dim=1)[rank], rtol=1e-12)
