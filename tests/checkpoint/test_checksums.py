"""Whatever is changed in a checkpoint after it was written is found, and the message names it."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path

import pytest

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.storage import CHECKSUMS, find_checkpoint
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.files.owner import OWNER, owning
from tests.checkpoint import logical
from tests.checkpoint.one_tensor import names, save, value_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with checkpoints of iterations 10 and 20."""
    save(tmp_path / "run", 10)
    save(tmp_path / "run", 20)
    return tmp_path / "run"


@pytest.mark.parametrize("name", [".metadata", "config.json", "training_state.json", CHECKSUMS])
def test_a_flipped_bit_in_a_small_file_is_found_wherever_it_is(name: str, root: Path) -> None:
    path = root / "iter_0000020" / name
    good = path.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 12)):
        for bit in (0, 6):
            path.write_bytes(good[:position] + bytes([good[position] ^ (1 << bit)]) + good[position + 1 :])
            with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} is damaged.* load another checkpoint"):
                find_checkpoint(root, 20)
    found = find_checkpoint(root)
    assert found is not None
    assert (found.iteration, str(path) in found.note) == (10, True)


def _save(mesh: Mesh, root: Path) -> None:
    logical.save(mesh, root, 1)


def test_small_files_have_the_sums_that_zlib_finds_and_data_files_none(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(_save, 4, tmp_path, layout=Layout(tp=2, dp=2))
    folder = tmp_path / "iter_0000001"
    told = json.loads((folder / CHECKSUMS).read_text())["files"]
    found = {name: f"{zlib.crc32((folder / name).read_bytes()):08x}" for name in (".metadata", *storage.DOCUMENTS)}
    assert told == found
    assert len(list(folder.glob("*.distcp"))) >= 4


def test_a_checkpoint_of_an_older_version_has_no_sums_and_loads(root: Path) -> None:
    (root / "iter_0000020" / CHECKSUMS).unlink()
    found = find_checkpoint(root)
    assert found is not None
    assert (found.iteration, found.note, value_of(found.path)) == (20, "", 20.0)


def test_a_folder_of_another_iteration_than_its_state_is_refused(root: Path) -> None:
    folder = root / "iter_0000020"
    (folder / CHECKSUMS).unlink()
    (folder / "training_state.json").write_text(json.dumps({"training": {"iteration": 20}}))
    assert storage.problem(folder) is None
    shutil.copytree(folder, root / "iter_0000030")
    with pytest.raises(CheckpointError, match=r"iter_0000030/training_state.json: the iteration is 20, but the folder"):
        find_checkpoint(root, 30)


def test_a_save_deletes_nothing_of_a_run_that_lives(root: Path) -> None:
    (root / "iter_0000030.tmp").mkdir()
    before = names(root)
    with owning(root / OWNER, "--save run"):
        owner = root / OWNER
        owner.write_text(json.dumps(json.loads(owner.read_text()) | {"host": "elsewhere", "machine": "other"}))
        with pytest.raises(CheckpointError, match="not saved: --save .* is used by another run .* host elsewhere"):
            save(root, 30)
        assert sorted([*before, OWNER]) == names(root)
        owner.unlink()
    save(root, 30)
    assert "iter_0000030" in names(root)


def test_a_checkpoint_of_an_older_version_has_sums_of_data_files_and_loads(root: Path) -> None:
    path = root / "iter_0000020" / CHECKSUMS
    files = json.loads(path.read_text())["files"] | {"__0_0.distcp": "00000000"}
    table = f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"
    path.write_text(json.dumps({"files": files, "files_checksum": table}))
    assert storage.problem(path.parent) is None
