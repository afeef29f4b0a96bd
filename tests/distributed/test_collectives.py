"""Every collective against its definition, and the differentiated pairs as each other's transpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.distributed.collectives import (
    all_gather_objects,
    all_reduce,
    barrier,
    broadcast_object,
    reduce_from_group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_gradients,
    sum_over_ranks,
)
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pool import ProcessPool

ALONE = Group((0,), 0, None)
LAYOUT = Layout(tp=2, dp=2)


def _everything(mesh: Mesh) -> dict[str, Any]:
    own = torch.tensor([float(mesh.rank), -float(mesh.rank)])
    results: dict[str, Any] = {op: all_reduce(own.clone(), mesh.dp, op) for op in ("sum", "max", "min")}
    results["objects"] = all_gather_objects({"rank": mesh.rank}, mesh.dp)
    results["object"] = [broadcast_object(("rank", mesh.rank), mesh.dp, source) for source in (0, 1)]
    barrier(mesh.world)
    return results


def test_each_collective_joins_the_members_of_its_group_alone(pool: ProcessPool) -> None:
    """Tensor-parallel groups are (0, 1) and (2, 3), data-parallel ones (0, 2) and (1, 3)."""
    for rank, results in enumerate(pool.run(_everything, 4, layout=LAYOUT)):
        low, high = LAYOUT.group_of(rank, "dp")
        assert results["sum"].tolist() == [low + high, -low - high]
        assert results["max"].tolist() == [high, -low]
        assert results["min"].tolist() == [low, -high]
        assert results["objects"] == [{"rank": low}, {"rank": high}]
        assert results["object"] == [("rank", low), ("rank", high)]


def test_alone_each_collective_is_the_identity() -> None:
    x = torch.randn(3, requires_grad=True)
    assert all_reduce(x, ALONE) is x
    assert reduce_from_group(x, ALONE) is x
    assert reduce_from_group(x, ALONE, sequence_parallel=True) is x
    assert sum_gradients(x, ALONE) is x
    for start in (start_all_reduce, start_all_gather, start_reduce_scatter):
        assert start(x, ALONE).wait() is x
    assert all_gather_objects("a", ALONE) == ["a"]
    assert broadcast_object("a", ALONE) == "a"
    barrier(ALONE)


def _uses(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """What all have alike: as it is used here, the gradient of that use, and the gradient that comes of it."""
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    y = sum_gradients(x, mesh.tp)
    cotangent = torch.randn(3, 2, generator=torch.Generator().manual_seed(mesh.rank))
    kept = cotangent.clone()
    y.backward(cotangent)
    assert torch.equal(cotangent, kept), "the incoming gradient was changed in place"
    assert x.grad is not None
    return y.detach(), cotangent, x.grad


def test_what_each_uses_in_part_gets_the_sum_of_the_gradients(pool: ProcessPool) -> None:
    results = pool.run(_uses, 4, layout=LAYOUT)
    for rank, (value, _, gradient) in enumerate(results):
        assert torch.equal(value, torch.arange(6.0).view(2, 3).t())
        assert torch.equal(gradient, sum(results[other][1] for other in LAYOUT.group_of(rank, "tp")))


def _reductions(mesh: Mesh) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of both reductions: input, output, gradient of the output, gradient of the input."""
    results = {}
    generator = torch.Generator().manual_seed(mesh.rank)
    for name, parallel in (("whole", False), ("part", True)):
        x = torch.randn(3, 8, generator=generator, dtype=torch.float64).t().requires_grad_()
        y = reduce_from_group(x, mesh.tp, sequence_parallel=parallel)
        cotangent = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        kept = cotangent.clone()
        y.backward(cotangent)
        assert torch.equal(cotangent, kept), "the incoming gradient was changed in place"
        results[name] = (x.detach(), y.detach(), cotangent, x.grad)
    return results


@pytest.mark.parametrize("tp", [2, 4])
def test_a_reduction_sums_forward_and_passes_the_gradient_back(pool: ProcessPool, tp: int) -> None:
    results = pool.run(_reductions, tp, layout=Layout(tp=tp))
    total = torch.stack([result["whole"][0] for result in results]).sum(0)
    parts = torch.stack([result["part"][0] for result in results]).sum(0).chunk(tp)
    cotangents = torch.cat([result["part"][2] for result in results])
    for rank, result in enumerate(results):
        _, y, cotangent, gradient = result["whole"]
        assert torch.allclose(y, total, atol=1e-14)
        assert torch.equal(gradient, cotangent)
        _, y, _, gradient = result["part"]
        assert torch.allclose(y, parts[rank], atol=1e-14)
        assert torch.equal(gradient, cotangents)


def _started(mesh: Mesh) -> tuple[Tensor, ...]:
    own = torch.arange(8.0) + 10 * mesh.rank
    return tuple(
        start(own.clone(), mesh.tp).wait() for start in (start_all_reduce, start_all_gather, start_reduce_scatter)
    )


def test_started_collectives_deliver_when_waited_for(pool: ProcessPool) -> None:
    own = [torch.arange(8.0) + 10 * rank for rank in range(4)]
    for rank, (reduced, gathered, scattered) in enumerate(pool.run(_started, 4, layout=Layout(tp=4))):
        assert torch.equal(reduced, sum(own))
        assert torch.equal(gathered, torch.cat(own))
        assert torch.equal(scattered, sum(own).chunk(4)[rank])


def _copies(mesh: Mesh, ranks: tuple[int, ...]) -> Tensor:
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(mesh.rank))
    return sum_over_ranks(tensor, ranks, mesh, mesh.model) if mesh.rank in ranks else tensor


@pytest.mark.parametrize("ranks", [(0, 1), (0, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_copies_are_summed_over_any_ranks_equal_bit_for_bit(pool: ProcessPool, ranks: tuple[int, ...]) -> None:
    results = pool.run(_copies, 4, ranks, layout=Layout(pp=4))
    own = [torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    for rank in range(4):
        if rank in ranks:
            assert torch.equal(results[rank], results[ranks[0]])
            assert torch.allclose(results[rank], sum(own[r] for r in ranks), atol=1e-6)
        else:
            assert torch.equal(results[rank], own[rank])
