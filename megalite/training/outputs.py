"""The folders that a run writes belong to it while it lives.

Key idea: two runs that save into one folder destroy each other's files, so the second is refused before it has built
anything. The first rank alone writes there what isn't a tensor, so it alone is the owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megalite.checkpoint.errors import on_first_rank
from megalite.config.fields import output_folders
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.files.owner import OWNER, owning


@contextmanager
def owned_outputs(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """While the block runs, what `output_folders` lists belongs to this run. Collective over the world.

    All ranks raise the same `CheckpointError`, which names the other run, where one lives that has such a folder.
    """
    folders = {Path(folder).resolve(): f"{flag} {folder}" for flag, folder in output_folders(config).items()}
    with ExitStack() as owned:

        def claim() -> None:
            for folder, flag in folders.items():
                owned.enter_context(owning(folder / OWNER, flag))

        on_first_rank(claim, mesh.world)
        yield
