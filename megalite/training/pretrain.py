"""A whole run: from flags to what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megalite.checkpoint.errors import on_first_rank
from megalite.config.fields import output_folders
from megalite.config.schema import RunConfig
from megalite.data.loader import telling_killed_workers
from megalite.distributed.launch import Environment, start
from megalite.distributed.mesh import Mesh
from megalite.files.owner import OWNER, owning
from megalite.files.remote import place
from megalite.training.loop import Loop
from megalite.training.prepare import deterministic, prepare
from megalite.training.run import build_run
from megalite.training.watchdog import watching


@contextmanager
def owned_outputs(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """While the block runs, what `output_folders` lists belongs to this run. Collective over the world.

    All ranks raise the same `CheckpointError`, which names the other run, where one lives that has such a folder.
    """
    folders = {place(folder).resolve(): f"{flag} {folder}" for flag, folder in output_folders(config).items()}
    with ExitStack() as owned:

        def claim() -> None:
            for folder, flag in folders.items():
                owned.enter_context(owning(folder / OWNER, flag))

        on_first_rank(claim, mesh.world)
        yield


def train(
    argv: Sequence[str],
    environment: Environment,
    *,
    program: str,
    description: str,
    sections: Sequence[str] | None = None,
) -> None:
    """The whole run of one process. `sections`: those of the configuration that have flags; None: pretraining's."""
    prepared = prepare(argv, environment, program=program, description=description, sections=sections)
    with (
        deterministic(prepared.config.training.deterministic_mode),
        start(prepared.config.layout, environment, prepared.device) as (mesh, watch),
        owned_outputs(prepared.config, mesh),
        telling_killed_workers(),
    ):
        run = build_run(prepared, mesh)
        with watching(prepared.config, mesh.rank, watch) as moved:
            Loop(run, moved).run()
            moved("saving the adapter")
            run.save_adapter()
            run.close()
