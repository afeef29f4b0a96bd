"""The layout made real for one process: its rank, device and process groups.

Key idea: a `Group` of size one needs no communication library, so one process without torchrun runs the same code.
Every group is made once here, from the one rank grid, and passed to those that need it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.distributed.layout import DENSE, DOMAINS, Layout

GROUP_AXES = (
    *(("tp",), ("cp",), ("dp",), ("pp",), ("ring",), ("heads",)),
    *(axes for domain in DOMAINS for axes in (domain.data_axes, domain.model_axes)),
    *(("pp", "dp", "cp"), ("pp", "dp", "cp", "tp"), ("ep", "etp")),
)
"""The axes along which a mesh has groups."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. `rank` is this process's index in it; `process_group` is None where it is alone."""

    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """This process's place in a layout, with a `Group` along each axis.

    `tp`, `pp`, `dp`, `cp`: one axis. `heads`, `ring`: context-parallel ranks that exchange heads, or keys and values.
    `dp_cp`: ranks that hold the same dense parameters and see other data.
    `model`: one replica (pp x tp). `experts`: ranks that share the experts of a layer (ep x etp).
    `all_but_tp`: ranks among which a number that tensor-parallel ranks hold alike is summed.
    `world`: all ranks of the layout, which may be the first ranks of a larger torch world (as in the process pool).
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, groups: dict[tuple[int, ...], dist.ProcessGroup]
    ):
        """Use `Mesh.create`; `groups` maps ranks to the process groups of this rank."""
        self.layout = layout
        self.rank = rank
        self.device = device
        self._process_groups = groups
        self._twins: list[dist.ProcessGroup] = []
        self.coordinates = layout.coordinates(rank)
        self._groups: dict[tuple[str, ...], Group] = {}
        for axes in GROUP_AXES:
            ranks = layout.group_of(rank, *axes)
            self._groups[axes] = Group(ranks, ranks.index(rank), groups.get(ranks))
        self.tp, self.cp, self.dp, self.pp = (self._groups[axis,] for axis in ("tp", "cp", "dp", "pp"))
        self.ring, self.heads = self.along(("ring",)), self.along(("heads",))
        self.dp_cp, self.model = self.along(DENSE.data_axes), self.along(DENSE.model_axes)
        self.experts = self.along(("ep", "etp"))
        self.all_but_tp = self.along(("pp", "dp", "cp"))
        self.world = self.along(("pp", "dp", "cp", "tp"))

    def along(self, axes: tuple[str, ...]) -> Group:
        """The ranks that differ from this one only along `axes`, which are among GROUP_AXES."""
        return self._groups[axes]

    @classmethod
    def create(
        cls,
        layout: Layout,
        device: torch.device,
        *,
        backend: str,
        timeout: timedelta,
    ) -> Mesh:
        """Make every process group that this rank is in. Collective over the ranks of each group.

        The default process group must exist where the layout has more than one rank, and this process must be one of
        its first `layout.world_size` ranks.
        """
        rank = dist.get_rank() if layout.world_size > 1 else 0
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for names in GROUP_AXES:
            ranks = layout.group_of(rank, *names)
            if len(ranks) == 1 or ranks in groups:
                continue
            if len(ranks) == dist.get_world_size():
                assert dist.group.WORLD is not None
                groups[ranks] = dist.group.WORLD
                continue
            # Each rank makes only its own groups, all ranks in the same order of axes, so that no cycle can arise.
            # Torch names such a group by its ranks and by how many groups this rank has: equal on all of its members.
            groups[ranks] = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
            )
        mesh = cls(layout, rank, device, groups)
        for ranks in dict.fromkeys(mesh.along(domain.model_axes).ranks for domain in DOMAINS):
            # NCCL makes a group's communicator at its first operation, in which all its ranks must take part; of a
            # replica a few ranks alone exchange tensors later (`collectives.sum_over_ranks`).
            replica = groups.get(ranks)
            if replica is not None:
                dist.all_reduce(torch.zeros(1, device=device), group=replica)
        return mesh

    def group_of_ranks(self, ranks: tuple[int, ...]) -> Group | None:
        """The group of exactly these ranks, where this mesh has one."""
        process_group = self._process_groups.get(ranks)
        return None if process_group is None else Group(ranks, ranks.index(self.rank), process_group)

    def twin_of_world(self) -> Group:
        """All ranks again, with a gloo process group of its own for another thread. Collective over the world."""
        if self.world.size == 1:
            return self.world
        ranks = self.world.ranks
        twin = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        self._twins.append(twin)
        return Group(ranks, self.world.rank, twin)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, from the host, on this rank's device, without waiting for it: from page-locked memory, since a copy
        from other memory waits until the device has done all before."""
        if self.device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Destroy the groups made here (not the default one)."""
        for group in (*self._process_groups.values(), *self._twins):
            if group is not dist.group.WORLD:
                with contextlib.suppress(ValueError):
                    dist.destroy_process_group(group)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the layout, which speaks for all."""
        return self.rank == 0


def single_process_mesh(device: torch.device | str = "cpu") -> Mesh:
    """A mesh of one process, for tools and tests."""
    return Mesh(Layout(), 0, torch.device(device), {})
