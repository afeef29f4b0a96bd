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
    broadcast,
    broadcast_object,
    copy_to_group,
    reduce_from_group,
)
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pool import ProcessPool

ALONE = Group((0,), 0, None)
LAYOUT = Layout(tp=2, dp=2)


def _everything(mesh: Mesh) -> dict[str, Any]:
    own = torch.tensor([float(mesh.rank), -float(mesh.rank)])
    results: dict[str, Any] = {op: all_reduce(own.clone(), mesh.dp, op) for op in ("sum", "max", "min")}
    results["broadcast"] = [broadcast(own.clone(), mesh.tp, source) for source in (0, 1)]
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
        assert [tensor[0].item() for tensor in results["broadcast"]] == list(LAYOUT.group_of(rank, "tp"))
        assert results["objects"] == [{"rank": low}, {"rank": high}]
        assert results["object"] == [("rank", low), ("rank", high)]


def test_alone_each_collective_is_the_identity() -> None:
    x = torch.randn(3, requires_grad=True)
    assert all_reduce(x, ALONE) is x
    assert broadcast(x, ALONE) is x
    assert copy_to_group(x, ALONE) is x
    assert reduce_from_group(x, ALONE) is x
    assert all_gather_objects("a", ALONE) == ["a"]
    assert broadcast_object("a", ALONE) == "a"
    barrier(ALONE)


def _pairs(mesh: Mesh) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For both functions: input, output, gradient of the output, gradient of the input."""
    results = {}
    generator = torch.Generator().manual_seed(mesh.rank)
    for name, function in (("copy", copy_to_group), ("reduce", reduce_from_group)):
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64).t().requires_grad_()
        y = function(x, mesh.tp)
        cotangent = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        kept = cotangent.clone()
        y.backward(cotangent)
        assert torch.equal(cotangent, kept), "the incoming gradient was changed in place"
        assert x.grad is not None
        results[name] = (x.detach(), y.detach(), cotangent, x.grad)
    return results


@pytest.mark.parametrize("tp", [2, 4])
def test_copying_and_reducing_are_transposes(pool: ProcessPool, tp: int) -> None:
    results = pool.run(_pairs, tp, layout=Layout(tp=tp))
    sums = {
        (name, i): torch.stack([result[name][i] for result in results]).sum(0)
        for name in ("copy", "reduce")
        for i in (0, 2)
    }
    for result in results:
        x, y, cotangent, gradient = result["copy"]
        assert torch.equal(x, y)
        assert torch.allclose(gradient, sums["copy", 2], atol=1e-14)
        x, y, cotangent, gradient = result["reduce"]
        assert torch.allclose(y, sums["reduce", 0], atol=1e-14)
        assert torch.equal(gradient, cotangent)
