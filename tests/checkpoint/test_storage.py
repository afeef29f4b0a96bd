"""The run folder: tracker, completeness, retention, replacing, leftovers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint import storage
from megalite.checkpoint.checkpoint import read_training_state
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.storage import TRACKER, Retention, find_checkpoint
from megalite.config.schema import CheckpointConfig
from megalite.peft.files import adapter_settings
from tests.checkpoint.one_tensor import names, save, value_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with checkpoints of iterations 10 and 20."""
    save(tmp_path / "run", 10)
    save(tmp_path / "run", 20)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("read", "given", "meant"),
    [
        (find_checkpoint, "model", "--load-hf {}"),
        (find_checkpoint, "adapter", "--adapter {}"),
        (read_huggingface_config, "run", "--load {}"),
        (read_huggingface_config, "run/iter_0000020", "--load {}"),
        (read_huggingface_config, "adapter", "--adapter {}"),
        (adapter_settings, "run", "--load {}"),
        (adapter_settings, "model", "--load-hf {}"),
    ],
)
def test_a_folder_of_another_kind_is_named_with_the_flag_that_takes_it(
    root: Path, read: Callable[[Path], object], given: str, meant: str
) -> None:
    for name, text in (("model/config.json", '{"model_type": "llama"}'), ("adapter/adapter_config.json", "{}")):
        path = root.parent / name
        path.parent.mkdir()
        path.write_text(text)
    folder = root.parent / given
    taken = folder.parent if folder.name.startswith("iter_") else folder
    with pytest.raises(CheckpointError, match="did you mean.* " + re.escape(meant.format(taken))):
        read(folder)


def shard(root: Path, iteration: int) -> Path:
    return next((root / f"iter_{iteration:07d}").glob("*.distcp"))


def test_a_run_folder_holds_what_megatron_users_expect(root: Path) -> None:
    assert names(root) == ["iter_0000010", "iter_0000020", "latest_checkpointed_iteration.txt"]
    assert (root / TRACKER).read_text() == "20"
    assert names(root / "iter_0000020") == [
        ".metadata",
        "__0_0.distcp",
        "checksums.json",
        "config.json",
        "training_state.json",
    ]


def test_the_trackers_checkpoint_is_found(root: Path) -> None:
    found = find_checkpoint(root)
    assert found == storage.CheckpointDirectory(20, root / "iter_0000020", "")
    (root / TRACKER).write_text("10\n")  # as an editor leaves it
    assert find_checkpoint(str(root)) == storage.CheckpointDirectory(10, root / "iter_0000010", "")


def test_a_found_checkpoint_serves_as_a_path(root: Path) -> None:
    found = find_checkpoint(root)
    assert found is not None
    assert read_training_state(found) == {"iteration": 20}


@pytest.mark.parametrize("make", [lambda root: None, lambda root: root.mkdir()], ids=["missing", "empty"])
def test_no_checkpoint_at_all_is_none(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run") is None


def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    storage.begin(tmp_path / "run", 5)
    assert names(tmp_path / "run") == ["iter_0000005.tmp"]
    assert find_checkpoint(tmp_path / "run") is None


@pytest.mark.parametrize("content", [b"", b"\n", b"iter", b"-5", b"2 0", b"\xff\xfe\x00", None])
def test_a_damaged_tracker_leads_to_the_newest_complete_checkpoint_and_says_so(
    content: bytes | None, root: Path
) -> None:
    (root / TRACKER).unlink() if content is None else (root / TRACKER).write_bytes(content)
    found = find_checkpoint(root)
    assert found is not None
    assert found.iteration == 20
    assert TRACKER in found.note
    assert "iter_0000020" in found.note


def damage(root: Path, how: str) -> None:
    path = root / "iter_0000020"
    if how == "truncated shard":
        data = shard(root, 20).read_bytes()
        shard(root, 20).write_bytes(data[:-10])
    elif how == "folder":
        shutil.rmtree(path)
    elif how == "config.json cut":
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text[: len(text) // 2])
    elif how == "shard":
        shard(root, 20).unlink()
    else:
        (path / how).unlink()


DAMAGES = ["shard", "truncated shard", "folder", ".metadata", "config.json", "training_state.json", "config.json cut"]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_incomplete_newest_checkpoint_is_passed_over_and_named(how: str, root: Path) -> None:
    damage(root, how)
    found = find_checkpoint(root)
    assert found is not None
    assert found.iteration == 10
    assert "iter_0000020" in found.note
    assert value_of(found.path) == 10.0


@pytest.mark.parametrize("how", DAMAGES)
def test_an_incomplete_checkpoint_that_was_asked_for_is_refused_with_the_others_listed(how: str, root: Path) -> None:
    damage(root, how)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 20: .*valid: 10$"):
        find_checkpoint(root, 20)


def test_a_run_without_any_complete_checkpoint_is_refused_rather_than_started_afresh(root: Path) -> None:
    damage(root, "truncated shard")
    shutil.rmtree(root / "iter_0000010")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*\.distcp is truncated"):
        find_checkpoint(root)


def test_a_step_is_found_whatever_the_tracker_says(root: Path) -> None:
    (root / TRACKER).write_text("")
    assert find_checkpoint(root, 10) == storage.CheckpointDirectory(10, root / "iter_0000010", "")


def test_a_step_that_is_not_there_lists_those_that_are(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt-step 15: .*valid: 10, 20"):
        find_checkpoint(root, 15)
    with pytest.raises(CheckpointError, match="--ckpt-step 15: .*does not exist"):
        find_checkpoint(tmp_path / "nowhere", 15)


def test_the_wrong_folder_is_explained(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is one checkpoint: give its parent folder"):
        find_checkpoint(root / "iter_0000020")
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(root / TRACKER)


def test_megatrons_release_checkpoints_are_refused_by_name(root: Path) -> None:
    (root / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="release.*Megatron"):
        find_checkpoint(root)


def test_a_checkpoint_saved_again_replaces_the_older_one(root: Path) -> None:
    save(root, 20, value=99.0)
    assert value_of(root / "iter_0000020") == 99.0
    assert names(root) == ["iter_0000010", "iter_0000020", TRACKER]


def test_going_back_moves_the_tracker_and_touches_nothing_newer(root: Path) -> None:
    save(root, 15, Retention(keep_last=1))
    assert names(root) == ["iter_0000015", "iter_0000020", TRACKER]
    found = find_checkpoint(root)
    assert found is not None
    assert found.iteration == 15


def test_a_replacement_that_was_interrupted_leaves_the_older_one_to_be_found(root: Path) -> None:
    (root / "iter_0000020").rename(root / "iter_0000020.old")
    storage.begin(root, 20)  # begins with putting it back
    assert "iter_0000020" in names(root)
    (root / "iter_0000020").rename(root / "iter_0000020.old")
    found = find_checkpoint(root)
    assert found is not None
    assert (found.iteration, found.path) == (20, root / "iter_0000020.old")
    assert "interrupted" in found.note
    assert value_of(found.path) == 20.0


def test_what_killed_saves_left_behind_goes_with_the_next_save(root: Path) -> None:
    for name in ("iter_0000030.tmp", "iter_0000015.tmp", "iter_0000020.old"):
        shutil.copytree(root / "iter_0000010", root / name)
    (root / f"{TRACKER}.tmp").write_text("3")
    (root / "notes").mkdir()
    save(root, 30)
    assert names(root) == ["iter_0000010", "iter_0000020", "iter_0000030", TRACKER, "notes"]


@pytest.mark.parametrize(
    ("retain", "kept"),
    [
        (Retention(), [1, 2, 3, 4, 5, 6]),
        (Retention(keep_last=1), [6]),
        (Retention(keep_last=3), [4, 5, 6]),
        (Retention(keep_last=9), [1, 2, 3, 4, 5, 6]),
        (Retention(interval=2), [2, 4, 6]),
        (Retention(interval=4), [4, 6]),
        (Retention(keep_last=2, interval=3), [3, 5, 6]),
    ],
    ids=str,
)
def test_retention_keeps_the_last_and_the_multiples(retain: Retention, kept: list[int], tmp_path: Path) -> None:
    for iteration in range(1, 7):
        save(tmp_path, iteration, retain)
    assert names(tmp_path) == [*(f"iter_{n:07d}" for n in kept), TRACKER]


def test_an_interval_deletes_only_the_one_before(root: Path) -> None:
    save(root, 30, Retention(interval=1000))
    assert names(root) == ["iter_0000010", "iter_0000030", TRACKER]


def test_retention_counts_complete_checkpoints_alone_and_spares_links(root: Path, tmp_path: Path) -> None:
    damage(root, "truncated shard")
    (root / "iter_0000005").symlink_to(root / "iter_0000010")
    save(root, 30, Retention(keep_last=2))
    assert names(root) == ["iter_0000005", "iter_0000010", "iter_0000020", "iter_0000030", TRACKER]


def test_retention_is_read_from_the_flags() -> None:
    config = CheckpointConfig(keep_last_checkpoints=3, save_retain_interval=500)
    assert Retention.from_config(config) == Retention(3, 500)


def test_a_checkpoint_that_cannot_be_deleted_is_only_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(storage, "remove_whole", refuse)
    with pytest.warns(UserWarning, match="iter_0000010 could not be deleted: Permission denied"):
        storage.retire(root, 20, 10, Retention(keep_last=1))
