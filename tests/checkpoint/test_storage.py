"""The run folder: tracker, completeness, retention, replacing, leftovers, and whatever is changed in it later."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint import storage
from megalite.checkpoint.checkpoint import read_training_state
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.storage import CHECKSUMS, TRACKER, Retention, find_checkpoint
from megalite.files.owner import OWNER, owning
from megalite.peft.files import adapter_settings
from tests.checkpoint.logical import found
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
    return next((root / f"iter_{iteration:07d}").glob("*.safetensors"))


def test_a_run_folder_holds_what_megatron_users_expect(root: Path) -> None:
    assert names(root) == ["iter_0000010", "iter_0000020", "latest_checkpointed_iteration.txt"]
    assert (root / TRACKER).read_text() == "20"
    assert names(root / "iter_0000020") == [
        "checksums.json",
        "config.json",
        "index.json",
        "rank00000_0.safetensors",
        "training_state.json",
    ]


def test_the_trackers_checkpoint_is_found(root: Path) -> None:
    assert found(root) == storage.CheckpointDirectory(20, root / "iter_0000020", "")
    (root / TRACKER).write_text("10\n")  # as an editor leaves it
    assert find_checkpoint(str(root)) == storage.CheckpointDirectory(10, root / "iter_0000010", "")
    assert read_training_state(found(root)) == {"iteration": 10}  # it serves as a path


def test_a_missing_or_empty_folder_or_a_first_save_that_was_killed_holds_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "run") is None
    (tmp_path / "run").mkdir()
    assert find_checkpoint(tmp_path / "run") is None
    storage.begin(tmp_path / "run", 5)
    assert names(tmp_path / "run") == ["iter_0000005.tmp"]
    assert find_checkpoint(tmp_path / "run") is None


@pytest.mark.parametrize("content", [b"", b"\n", b"iter", b"-5", b"2 0", b"\xff\xfe\x00", None])
def test_a_damaged_tracker_leads_to_the_newest_complete_checkpoint_and_says_so(
    content: bytes | None, root: Path
) -> None:
    (root / TRACKER).unlink() if content is None else (root / TRACKER).write_bytes(content)
    checkpoint = found(root)
    assert checkpoint.iteration == 20
    assert TRACKER in checkpoint.note
    assert "iter_0000020" in checkpoint.note


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


DAMAGES = ["shard", "truncated shard", "folder", "index.json", "config.json", "training_state.json", "config.json cut"]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_incomplete_newest_checkpoint_is_passed_over_and_named_or_refused_where_asked_for(
    how: str, root: Path
) -> None:
    damage(root, how)
    checkpoint = found(root)
    assert checkpoint.iteration == 10
    assert "iter_0000020" in checkpoint.note
    assert value_of(checkpoint.path) == 10.0
    with pytest.raises(CheckpointError, match=r"--ckpt-step 20: .*valid: 10$"):
        find_checkpoint(root, 20)


def test_a_run_without_any_complete_checkpoint_is_refused_rather_than_started_afresh(root: Path) -> None:
    damage(root, "truncated shard")
    shutil.rmtree(root / "iter_0000010")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*\.safetensors is truncated"):
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
    assert found(root).iteration == 15


def test_a_replacement_that_was_interrupted_leaves_the_older_one_to_be_found(root: Path) -> None:
    (root / "iter_0000020").rename(root / "iter_0000020.old")
    storage.begin(root, 20)  # begins with putting it back
    assert "iter_0000020" in names(root)
    (root / "iter_0000020").rename(root / "iter_0000020.old")
    checkpoint = found(root)
    assert (checkpoint.iteration, checkpoint.path) == (20, root / "iter_0000020.old")
    assert "interrupted" in checkpoint.note
    assert value_of(checkpoint.path) == 20.0


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
        (Retention(interval=4), [4, 6]),
        (Retention(keep_last=2, interval=3), [3, 5, 6]),
    ],
    ids=str,
)
def test_retention_keeps_the_last_and_the_multiples(retain: Retention, kept: list[int], tmp_path: Path) -> None:
    for iteration in range(1, 7):
        save(tmp_path, iteration, retain)
    assert names(tmp_path) == [*(f"iter_{n:07d}" for n in kept), TRACKER]


@pytest.mark.parametrize(
    ("retain", "kept"),
    [
        (Retention(keep_best=1), [3, 6]),
        (Retention(keep_best=2), [1, 3, 6]),
        (Retention(keep_best=2, keep_last=2), [1, 3, 5, 6]),
        (Retention(keep_best=1, interval=4), [3, 4, 6]),
    ],
    ids=str,
)
def test_the_best_by_validation_loss_stay_beside_the_newest(retain: Retention, kept: list[int], tmp_path: Path) -> None:
    losses = {1: 2.0, 2: 3.0, 3: 1.0, 4: math.nan, 5: None, 6: 4.0}
    for iteration, loss in losses.items():
        state = {"training": {"iteration": iteration, "valid_loss": loss}}
        save(tmp_path, iteration, retain, state=state)
    assert names(tmp_path) == [*(f"iter_{n:07d}" for n in kept), TRACKER]


def test_an_interval_deletes_only_the_one_before(root: Path) -> None:
    save(root, 30, Retention(interval=1000))
    assert names(root) == ["iter_0000010", "iter_0000030", TRACKER]


def test_retention_counts_complete_checkpoints_alone_and_spares_links(root: Path, tmp_path: Path) -> None:
    damage(root, "truncated shard")
    (root / "iter_0000005").symlink_to(root / "iter_0000010")
    save(root, 30, Retention(keep_last=2))
    assert names(root) == ["iter_0000005", "iter_0000010", "iter_0000020", "iter_0000030", TRACKER]


def test_a_checkpoint_that_cannot_be_deleted_is_only_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(storage, "remove_whole", refuse)
    with pytest.warns(UserWarning, match="iter_0000010 could not be deleted: Permission denied"):
        storage.retire(root, 20, 10, Retention(keep_last=1))


@pytest.mark.parametrize("name", ["index.json", "config.json", "training_state.json", CHECKSUMS])
def test_a_flipped_bit_in_a_small_file_is_found_wherever_it_is(name: str, root: Path) -> None:
    path = root / "iter_0000020" / name
    good = path.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 12)):
        for bit in (0, 6):
            path.write_bytes(good[:position] + bytes([good[position] ^ (1 << bit)]) + good[position + 1 :])
            with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} is damaged.* load another checkpoint"):
                find_checkpoint(root, 20)
    assert (found(root).iteration, str(path) in found(root).note) == (10, True)


def test_small_files_have_the_sums_that_zlib_finds_and_data_files_none(root: Path) -> None:
    folder = root / "iter_0000020"
    stored = json.loads((folder / CHECKSUMS).read_text())["files"]
    assert stored == {
        name: f"{zlib.crc32((folder / name).read_bytes()):08x}" for name in (*storage.DOCUMENTS, "index.json")
    }


def test_a_checkpoint_of_an_older_version_has_no_sums_or_those_of_data_files_too_and_loads(root: Path) -> None:
    path = root / "iter_0000020" / CHECKSUMS
    files = json.loads(path.read_text())["files"] | {"__0_0.distcp": "00000000"}
    table = f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"
    path.write_text(json.dumps({"files": files, "files_checksum": table}))
    assert found(root) == storage.CheckpointDirectory(20, path.parent, "")
    path.unlink()
    assert found(root) == storage.CheckpointDirectory(20, path.parent, "")


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
        (root / OWNER).write_text("process 1 on host elsewhere")
        with pytest.raises(CheckpointError, match="not saved: --save .* is used by another run .*host elsewhere"):
            save(root, 30)
        assert sorted([*before, OWNER]) == names(root)
    save(root, 30)
    assert "iter_0000030" in names(root)
