"""A run's folders are its own while it lives."""

from __future__ import annotations

from pathlib import Path

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.files.owner import OWNER
from megalite.training.outputs import owned_outputs


def config_of(folder: Path) -> RunConfig:
    config = RunConfig()
    config.checkpoint.save, config.peft.save_adapter = str(folder), f"{folder}/../{folder.name}"  # one folder twice
    return config


def _try(mesh: Mesh, folder: Path) -> str:
    try:
        with owned_outputs(config_of(folder), mesh):
            return f"owned: {(folder / OWNER).exists()}"
    except UserError as error:
        return str(error)


def test_a_second_run_is_refused_on_all_its_ranks_and_goes_on_when_the_first_has_ended(
    pool: ProcessPool, tmp_path: Path
) -> None:
    with owned_outputs(config_of(tmp_path), single_process_mesh()):
        messages = pool.run(_try, 2, tmp_path, layout=Layout(dp=2))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"--save-adapter {tmp_path}")
    assert "is written by another run (process " in messages[0]
    assert pool.run(_try, 2, tmp_path, layout=Layout(dp=2))[0] == "owned: True"
    assert list(tmp_path.iterdir()) == []
