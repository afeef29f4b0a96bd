"""Checkpoints in object storage: what a save that ends anywhere leaves, what damage is told, who owns the place.

Most of it is on fsspec's store in memory, which is as poor in operations as any: no rename, no lock. What depends on a
real store's answers is on the server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from s3fs.core import S3File

from megalite.checkpoint.errors import CheckpointError, attempt
from megalite.checkpoint.storage import OWNER, TRACKER, Retention, find_checkpoint
from megalite.config.errors import UserError
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.files.owner import check_unowned, owning
from megalite.files.remote import Remote, RemoteError
from tests.checkpoint import logical
from tests.checkpoint.one_tensor import names, save, value_of
from tests.s3 import at, down_from, environment


@pytest.fixture
def root() -> Iterator[Remote]:
    """An empty place in memory."""
    folder = at("memory://store/run")
    folder.remove_tree()
    yield folder
    folder.remove_tree()


def newest(root: Remote) -> int:
    """The checkpoint that is found, which holds one save's values throughout."""
    found = find_checkpoint(root)
    assert found is not None
    assert value_of(found.path) == found.iteration
    return found.iteration


@pytest.mark.filterwarnings("ignore:.*the store is down")
def test_a_save_that_ends_at_any_operation_leaves_the_checkpoint_before_it_and_the_next_one_clears_up(
    root: Remote,
) -> None:
    for operation in range(1, 100):
        root.remove_tree()
        save(root, 1)
        save(root, 2)
        with down_from(operation) as count:
            wrong = attempt(lambda: save(root, 3, Retention(keep_last=2)))
        assert newest(root) == (3 if wrong is None else 2)
        if count[0] < operation:
            assert operation > 15
            return
        assert wrong is None or ("iter_0000003 was not saved: " in wrong and "the store is down" in wrong)
        save(root, 3, Retention(keep_last=2))
        assert newest(root) == 3
        assert names(root)[-3:] == ["iter_0000002", "iter_0000003", TRACKER]
    raise AssertionError("it never ended well")


def test_replacing_a_checkpoint_leaves_at_no_moment_a_mixture_of_both(root: Remote) -> None:
    for operation in range(1, 100):
        root.remove_tree()
        save(root, 1)
        save(root, 2, value=2.5)
        with down_from(operation) as count:
            wrong = attempt(lambda: save(root, 2))
        found = find_checkpoint(root)
        assert found is not None and value_of(found.path) in ((1.0,) if found.iteration == 1 else (2.0, 2.5))
        if wrong is None and count[0] < operation:
            assert value_of(found.path) == 2.0
            return
    raise AssertionError("it never ended well")


def test_a_failed_save_leaves_nothing_where_the_store_still_answers(root: Remote) -> None:
    save(root, 1)
    with (
        mock.patch.object(Remote, "writing", side_effect=RemoteError(5, "no space", "here")),
        pytest.raises(CheckpointError, match="iter_0000002 was not saved: .*no space"),
    ):
        save(root, 2)
    assert names(root) == ["iter_0000001", TRACKER]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "checksums.json").unlink(), "checksums.json is missing, which a save writes last"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "safetensors: No such file or directory"),
        (lambda folder: (folder / "index.json").unlink(), "index.json"),
        (
            lambda folder: change(folder / "config.json", lambda content: content[:-9] + b" " * 9),
            "config.json is damaged",
        ),
        (lambda folder: change(next(folder.glob("*.safetensors")), lambda content: content[:-1]), "is truncated"),
    ],
    ids=["marker", "shard", "index", "byte", "truncated"],
)
def test_damage_is_told_and_the_older_checkpoint_is_found(
    root: Remote, damage: Callable[[Remote], None], told: str
) -> None:
    save(root, 1)
    save(root, 2)
    damage(root / "iter_0000002")
    found = find_checkpoint(root)
    assert found is not None and found.iteration == 1
    assert "iteration 2, which isn't complete" in found.note and told in found.note
    with pytest.raises(CheckpointError, match=re.escape("--ckpt-step 2: ") + ".*valid: 1"):
        find_checkpoint(root, 2)


def change(file: Remote, how: Callable[[bytes], bytes]) -> None:
    file.write_bytes(how(file.read_bytes()))


def test_a_flipped_byte_of_a_tensor_is_told(root: Remote) -> None:
    folder = save(root, 1)
    change(next(folder.glob("*.safetensors")), lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="memory://store/run/iter_0000001/.*: damaged: wrong checksum"):
        value_of(folder)


def _save(mesh: Mesh, server: dict[str, str], address: str) -> None:
    with mock.patch.dict(os.environ, server):
        logical.save(mesh, at(address), 1)


def _load(mesh: Mesh, server: dict[str, str], address: str) -> None:
    with mock.patch.dict(os.environ, server):
        logical.assert_true(logical.load(mesh, at(address) / "iter_0000001"))


def test_what_two_processes_write_to_a_server_they_read_at_another_layout(bucket: str, pool: ProcessPool) -> None:
    address = f"{bucket}/layouts"
    pool.run(_save, 2, environment(), address, layout=Layout(tp=2))
    pool.run(_load, 2, environment(), address, layout=Layout(pp=2))
    files = {each.name for each in at(f"{address}/iter_0000001").iterdir()}
    assert {"rank00000_0.safetensors", "rank00001_0.safetensors"} < files


def test_a_reader_takes_the_bytes_of_its_blocks_alone(bucket: str) -> None:
    file, asked = at(f"{bucket}/ranges/file"), []
    file.write_bytes(bytes(range(256)) * 1000)
    fetch, target = S3File._fetch_range, bytearray(300)

    def counting(self: S3File, start: int, end: int) -> bytes:
        asked.append((start, end))
        return bytes(fetch(self, start, end))

    with mock.patch.object(S3File, "_fetch_range", counting), file.open() as stream:
        stream.seek(1000)
        assert stream.readinto(target) == 300
    assert bytes(target) == (bytes(range(256)) * 1000)[1000:1300]
    assert asked == [(1000, 1300)]


@pytest.mark.parametrize("size", [10, 60 << 20])
def test_an_object_whose_writer_fails_is_not_there(bucket: str, size: int) -> None:
    file = at(f"{bucket}/half/{size}")
    with pytest.raises(TypeError), file.writing() as stream:
        stream.write(bytes(size) + None)  # type: ignore[operator]
    assert not file.exists()


# ------------------------------------------------------------------------------------------------------------ owners


def owner_of(root: Remote, **changes: Any) -> None:
    """Have the place owned by this process, but for `changes`."""
    with owning(root / OWNER, "--save"):
        values = json.loads((root / OWNER).read_text())
    (root / OWNER).write_text(json.dumps(values | changes))


def test_a_second_run_is_told_who_has_the_place(root: Remote) -> None:
    with owning(root / OWNER, f"--save {root}"):
        check_unowned(root / OWNER, f"--save {root}", but_mine=True)
        for claim in (
            lambda: owning(root / OWNER, f"--save {root}").__enter__(),
            lambda: check_unowned(root / OWNER, "it"),
        ):
            with pytest.raises(UserError, match=rf"is used by another run \(process {os.getpid()} on host .*, since 2"):
                claim()
    assert not (root / OWNER).exists()


def test_a_run_elsewhere_is_taken_to_live_and_the_message_says_what_to_delete(root: Remote) -> None:
    owner_of(root, host="node7", machine="another")
    with pytest.raises(CheckpointError, match=f"host node7, .*killed on its machine, delete {root}/.owner"):
        save(root, 1)
    assert names(root) == [OWNER]


@pytest.mark.parametrize(
    "changes",
    [
        {"born": "1"},
        {"process": 2**22 + 1},
        {"machine": "another", "job": "torchrun run7"},
        {"machine": "another", "job": "SLURM job 4.0"},
    ],
    ids=["its number is another process's", "no such process", "torchrun again", "requeued"],
)
def test_a_place_whose_owner_is_dead_for_sure_is_taken_over(
    root: Remote, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_of(root, **changes)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if "torchrun" in changes.get("job", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    save(root, 1)
    with owning(root / OWNER, "it"):
        assert json.loads((root / OWNER).read_text())["process"] == os.getpid()


def test_one_that_lost_its_place_saves_no_more(root: Remote) -> None:
    with owning(root / OWNER, "it"):
        owner_of_another = json.loads((root / OWNER).read_text()) | {"machine": "another", "host": "node7"}
        (root / OWNER).write_text(json.dumps(owner_of_another))
        with pytest.raises(CheckpointError, match="host node7"):
            save(root, 1)
    assert (root / OWNER).exists()  # it isn't this run's to delete


def test_of_two_that_claim_at_once_one_gets_it(bucket: str) -> None:
    file = at(f"{bucket}/claimed/.owner")
    with owning(file, "it"), pytest.raises(FileExistsError):
        file.write_bytes(b"{}", new=True)
