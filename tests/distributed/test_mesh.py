"""Meshes in real processes: each group that a rank makes holds just the ranks that it should."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from tests.helpers import PRELOADED

GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "model": ("pp", "tp"),
    "world": ("pp", "dp", "cp", "tp"),
}
LAYOUTS = [Layout(tp=2, dp=2), Layout(tp=2, pp=2), Layout(cp=2, dp=2), Layout(dp=4), Layout(tp=4), Layout(pp=2, cp=2)]


def _first_operations() -> list[tuple[tuple[int, ...], int]]:
    """(ranks of the group, numbers reduced) of what a rank does while its mesh is made."""
    seen = []
    original = dist.all_reduce

    def spy(tensor: torch.Tensor, **given: Any) -> Any:
        seen.append((tuple(dist.get_process_group_ranks(given["group"])), tensor.numel()))
        return original(tensor, **given)

    dist.all_reduce = spy
    try:
        Mesh.create(
            Layout(tp=2, pp=2, dp=2), torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=60)
        ).close()
    finally:
        dist.all_reduce = original
    return seen


def _members(mesh: Mesh) -> dict[str, list[int]]:
    """The ranks that meet in each group of a mesh."""
    return {name: all_gather_objects(mesh.rank, getattr(mesh, name)) for name in GROUPS}


def _members_of_every_group() -> list[dict[str, list[int]]]:
    """For each layout, the ranks that meet in each group of this rank's mesh."""
    result = []
    for layout in LAYOUTS:
        mesh = Mesh.create(layout, torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=60))
        result.append(_members(mesh))
    mesh.close()
    return result


def test_the_groups_that_ranks_or_a_pool_make_are_those_of_the_layout() -> None:
    with ProcessPool(4, preload=PRELOADED) as workers:
        by_rank = workers.run(_members_of_every_group, 4)
        of_the_pool = [workers.run(_members, 4, layout=layout) for layout in LAYOUTS]
    for rank, (number, layout) in itertools.product(range(4), enumerate(LAYOUTS)):
        expected = {name: list(layout.group_of(rank, *axes)) for name, axes in GROUPS.items()}
        assert by_rank[rank][number] == of_the_pool[number][rank] == expected, layout


def test_the_group_whose_ranks_exchange_tensors_in_pairs_first_meets_as_a_whole() -> None:
    """NCCL makes its communicator then; a batch of sends between a few ranks mustn't be the first operation."""
    layout = Layout(tp=2, pp=2, dp=2)
    with ProcessPool(8, preload=PRELOADED) as workers:
        for rank, seen in enumerate(workers.run(_first_operations, 8)):
            replicas = layout.group_of(rank, "pp", "tp"), layout.group_of(rank, "pp", "ep", "etp")  # dense, experts'
            assert seen == [(ranks, 1) for ranks in replicas]


def test_one_process_needs_no_process_group() -> None:
    mesh = single_process_mesh()
    created = Mesh.create(Layout(), torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=1))
    for each in (mesh, created):
        assert each.is_first
        assert all(getattr(each, name).ranks == (0,) for name in GROUPS)
        assert all(getattr(each, name).process_group is None for name in GROUPS)
        each.close()
    assert not torch.distributed.is_initialized()


class _Copies(TorchDispatchMode):
    """Notes of each copy from host to device whether its source is page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and not args[0].is_cuda and result.is_cuda:
            self.pinned.append(args[0].is_pinned())
        return result


@pytest.mark.cuda
def test_what_is_uploaded_within_a_step_comes_from_page_locked_memory() -> None:
    mesh = single_process_mesh("cuda")
    with _Copies() as copies:
        results = [mesh.upload(tensor) for tensor in (torch.arange(5), torch.arange(5).pin_memory())]
    assert all(result.tolist() == list(range(5)) for result in results)
    assert copies.pinned == [True, True]


def test_an_upload_on_a_cpu_is_the_tensor_itself() -> None:
    tensor = torch.arange(5)
    assert single_process_mesh().upload(tensor) is tensor
