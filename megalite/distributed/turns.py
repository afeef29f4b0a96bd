"""Work that each machine's first process does before the others of that machine, however long it takes.

The key idea: those that wait ask the store now and then. A collective would end the run at its timeout.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megalite.distributed.collectives import broadcast_object
from megalite.distributed.mesh import Mesh

T = TypeVar("T")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds: one store serves all, who may be thousands


def first_of_machine_first(work: Callable[[], T], mesh: Mesh, *, first: bool) -> T:
    """The result of `work`, which processes that aren't `first` on their machine begin when all that are have done it.

    Collective over the world. Where a first process fails, the others fail as those whose peer is gone.
    """
    if mesh.world.size == 1:
        return work()
    store = dist.distributed_c10d._get_default_store()
    key = f"turns/{broadcast_object(secrets.token_hex(8), mesh.world)}"
    try:
        done = [work()] if first else []
    except BaseException:
        store.add(key, 2 * mesh.world.size)  # more than all of them can be
        raise
    ready, pause = store.add(key, 1), _SHORTEST_PAUSE
    while ready < mesh.world.size:
        time.sleep(pause)
        ready, pause = store.add(key, 0), min(2 * pause, _LONGEST_PAUSE)
    if ready > mesh.world.size:
        raise RuntimeError("remote process exited: another process failed before this one's turn")
    return done[0] if done else work()
