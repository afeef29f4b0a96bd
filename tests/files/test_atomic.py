"""What is written is there whole or not at all, at every moment and whatever fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import UserError
from megalite.files import atomic
from megalite.files.atomic import new_folder, publish_folder, remove_leftovers, replacing, replacing_together, together

NAMES = ("weights", "extra", "config")
OLD = {"weights": "old", "extra": "old", "config": "old"}
NEW = {"weights": "new", "config": "new"}


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@contextmanager
def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every change of the disk from number `call` on doesn't happen: as where the process was killed there."""
    count = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count >= call:
                raise Killed
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for owner, name in [
            (os, "rename"),
            (os, "replace"),
            (os, "link"),
            (os, "fsync"),
            (Path, "unlink"),
            (Path, "mkdir"),
        ]:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        patch.setattr(atomic.shutil, "rmtree", dying(atomic.shutil.rmtree))
        yield


def write(folder: Path, content: dict[str, str]) -> None:
    with replacing_together(folder, NAMES) as place:
        for name, text in content.items():
            (place / name).write_text(text)


def full_disk(path: Path) -> None:
    """A part is written, and no more."""
    path.write_text("ne")
    raise OSError(28, "No space left on device")


def read(folder: Path) -> dict[str, str]:
    place = together(folder)
    return {name: (place / name).read_text() for name in NAMES if (place / name).exists()}


def test_files_written_together_are_all_old_or_all_new_wherever_a_kill_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    done = False
    while not done:
        call = len(seen) + 1
        folder = tmp_path / str(call)
        write(folder, OLD)
        (folder / "log").write_text("someone else's")
        with killed_at(call, monkeypatch):
            try:
                write(folder, NEW)
                done = True
            except Killed:
                pass
        assert read(folder) in (OLD, NEW), call
        plain = {name: (folder / name).read_text() for name in NAMES if (folder / name).exists()}
        assert plain in (OLD, NEW) or "config" not in plain, "another program would mix old and new"
        seen.append(read(folder))
        write(folder, OLD)
        assert sorted(path.name for path in folder.iterdir()) == ["config", "extra", "log", "weights"]
    assert seen[0] == OLD
    assert seen.count(NEW) > 3, "no kill came after the new files were complete"


def test_a_full_disk_leaves_the_old_files(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    with pytest.raises(OSError, match="No space"), replacing_together(tmp_path, NAMES) as place:
        full_disk(place / "weights")
    assert read(tmp_path) == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    with replacing(path) as stream:
        stream.write(b"one")
        assert not path.exists()
    with pytest.raises(UserError, match=f"cannot write {path}: No space left"), replacing(path):
        full_disk(tmp_path / "other")
    assert path.read_bytes() == b"one"
    with replacing(path, keep_existing=True) as stream:
        stream.write(b"late")
    assert path.read_bytes() == b"one"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_two_writers_of_one_file_never_share_a_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first" * 1000)
        second.write(b"second")
    assert path.read_bytes() == b"first" * 1000


def test_a_folder_has_its_name_only_once_all_in_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def name_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name if sys.platform == "linux" else "?"

    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(name_of(fd)), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    with new_folder(tmp_path / "model") as folder:
        (folder / "sub").mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "sub" / "deep").write_text("x")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {"config.json", "deep", "sub"} <= set(before)
    assert tmp_path.name in after
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "deep", "model", "sub"]


def test_an_older_folder_can_be_found_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(1, 40):
        root = tmp_path / str(call)
        for name, text in (("target", "old"), ("written", "new")):
            (root / name).mkdir(parents=True)
            (root / name / "file").write_text(text)
        with killed_at(call, monkeypatch):
            try:
                publish_folder(root / "written", root / "target")
                break
            except Killed:
                pass
        found = root / "target" if (root / "target").exists() else root / "target.old"
        assert (found / "file").read_text() in ("old", "new")
    assert call > 5
    assert [path.name for path in root.iterdir()] == ["target"]


def test_only_what_was_being_written_for_the_named_targets_is_cleared_away(tmp_path: Path) -> None:
    for name in ("a.bin.12.0123abcd.tmp", "a.bin.tmp", "ab.bin.tmp", "a.bin", "a.bin.x.tmp", "notes.tmp"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path, atomic.re.compile(r"a\.bin"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.bin.x.tmp", "ab.bin.tmp", "notes.tmp"]
