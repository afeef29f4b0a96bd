"""Meshes in real processes: each group that a rank makes holds just the ranks that it should."""

from __future__ import annotations

from datetime import timedelta

import torch

from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool

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


def _members_of_every_group() -> list[dict[str, list[int]]]:
    """For each layout, the ranks that meet in each group of this rank's mesh."""
    result = []
    for layout in LAYOUTS:
        mesh = Mesh.create(layout, torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=60))
        result.append({name: all_gather_objects(mesh.rank, getattr(mesh, name)) for name in GROUPS})
    mesh.close()
    return result


def test_the_groups_that_ranks_make_are_those_of_the_layout() -> None:
    with ProcessPool(4) as workers:
        for rank, by_layout in enumerate(workers.run(_members_of_every_group, 4)):
            for layout, members in zip(LAYOUTS, by_layout, strict=True):
                expected = {name: list(layout.group_of(rank, *axes)) for name, axes in GROUPS.items()}
                assert members == expected, layout


def test_one_process_needs_no_process_group() -> None:
    mesh = single_process_mesh()
    created = Mesh.create(Layout(), torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=1))
    for each in (mesh, created):
        assert each.is_first
        assert all(getattr(each, name).ranks == (0,) for name in GROUPS)
        assert all(getattr(each, name).process_group is None for name in GROUPS)
        each.close()
    assert not torch.distributed.is_initialized()
