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
_POLL_SECONDS = 0.05


def first_of_machine_first(work: Callable[[], T], mesh: Mesh, *, first: bool) -> T:
    """The result of `work`, which processes that aren't `first` on their machine begin when all that are have done it.

    Collective over the world. Where a first process fails, the others fail as those whose peer is gone.
    """
    if mesh.world.size == 1:
        return work()
    store = dist.distributed_c10d._get_default_store()
    key = f"turns/{broadcast_object(secrets.token_hex(8), mesh.world)}"
    failed = f"{key}/failed"
    try:
        done = [work()] if first else []
    except BaseException:
        store.set(failed, "")
        raise
    store.add(key, 1)
    while store.add(key, 0) < mesh.world.size:
        if store.check([failed]):
            raise RuntimeError("remote process exited: another process failed before this one's turn")
        time.sleep(_POLL_SECONDS)
    return done[0] if done else work()
