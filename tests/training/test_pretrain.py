"""A run's folders are its own while it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.files.owner import OWNER
from megalite.training.metrics import check_sinks
from megalite.training.pretrain import owned_outputs


def config_of(folder: Path) -> RunConfig:
    config = RunConfig()
    config.checkpoint.save, config.peft.save_adapter = str(folder), f"{folder}/../{folder.name}"  # one folder twice
    return config


def test_a_run_owns_just_the_folders_that_it_writes(tmp_path: Path) -> None:
    """Checkpoints come of training alone, adapters of a run that only evaluates too."""
    config = RunConfig()
    config.checkpoint.save, config.peft.save_adapter, config.peft.save_best_adapter = (
        str(tmp_path / name) for name in ("save", "last", "best")
    )
    for skip_train, written in ((False, {"save", "last", "best"}), (True, {"last", "best"})):
        config.validation.skip_train = skip_train
        with owned_outputs(config, single_process_mesh()):
            assert {file.parent.name for file in tmp_path.glob(f"*/{OWNER}")} == written
            assert check_sinks(config) == []


@pytest.mark.parametrize(
    ("flag", "section"),
    [
        ("--save", "checkpoint"),
        ("--save-adapter", "peft"),
        ("--save-best-adapter", "peft"),
        ("--tensorboard-dir", "logging"),
        ("--timeline", "logging"),
        ("--metrics-file", "logging"),
    ],
)
def test_a_folder_that_cannot_be_made_is_found_before_the_run(flag: str, section: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = RunConfig()
    place = "under/m.jsonl" if flag == "--metrics-file" else "under"
    setattr(getattr(config, section), flag[2:].replace("-", "_"), f"{tmp_path}/file/{place}")
    (problem,) = check_sinks(config)
    assert problem.startswith(f"{flag}: {tmp_path}/file/under can't be made")


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
    assert messages[0].startswith(f"--save {tmp_path} ")
    assert "is used by another run (process " in messages[0]
    assert pool.run(_try, 2, tmp_path, layout=Layout(dp=2))[0] == "owned: True"
    assert list(tmp_path.iterdir()) == []
