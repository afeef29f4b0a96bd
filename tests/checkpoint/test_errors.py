"""What goes wrong on one rank is raised alike on all."""

from __future__ import annotations

import pytest

from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank
from megalite.config.errors import FlagError
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool


def _bad_flag() -> None:
    raise FlagError("--save x: bad")


def _messages(mesh: Mesh) -> tuple[str, str]:
    with pytest.raises(CheckpointError) as first:
        on_first_rank(_bad_flag, mesh.world)
    with pytest.raises(CheckpointError) as last:
        agree(attempt(_bad_flag) if mesh.rank == 1 else None, mesh.world)
    return str(first.value), str(last.value)


def test_a_bad_flag_that_one_rank_alone_finds_is_raised_on_all(pool: ProcessPool) -> None:
    assert pool.run(_messages, 2, layout=Layout(dp=2)) == [("--save x: bad", "rank 1: --save x: bad")] * 2
