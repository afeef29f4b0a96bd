"""Files and folders that appear whole or not at all: the one place that knows how.

Key idea: everything is written beside its target, under a name that no other process uses, and is on the disk (fsync)
before a rename gives it its own name. POSIX makes a rename atomic, so a kill or a full disk leaves the old or the new.
A name ends in `.PID.RANDOM.tmp`, so what a killed process left behind can be told from everything else.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megalite.config.errors import UserError
from megalite.files.remote import Place, Remote

PENDING = ".new"
"""Subfolder in which the files of `replacing_together` are complete before they take their places."""
COMPLETE = "complete"
"""Object in `PENDING` that says they are, where a folder can't be given its name."""

_TEMPORARY = re.compile(r"(.+?)(\.\d+\.[0-9a-f]{8})?\.tmp")  # of the target that group 1 names
Name = str | os.PathLike[str]


def _beside(target: Path) -> Path:
    """A name in the target's folder that nobody else uses."""
    return target.with_name(f"{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Delete what killed processes were writing for targets in `folder` whose names match. Only for whoever owns the
    place: a process that still runs loses its file too."""
    for path in folder.glob("*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and names.fullmatch(found[1]):
            remove(path)


def remove(path: Place) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if isinstance(path, Remote):
        path.remove_tree()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(stream: BinaryIO) -> None:
    """Have all that was written to an open file on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(path: Name) -> None:
    """Have new and renamed entries of a folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Have all files and folders in a folder on the disk, whoever wrote them."""
    for where, _, names in os.walk(folder):
        for name in names:
            sync_folder(Path(where, name))  # a file opened to read is synced like a folder
        sync_folder(where)


@contextmanager
def writing(path: Place) -> Iterator[BinaryIO]:
    """A new file to write under its own name, whole and on the disk at the end of the block."""
    if isinstance(path, Remote):
        with path.writing() as stream:
            yield stream
        return
    with path.open("wb") as stream:
        yield stream
        sync(stream)


@contextmanager
def replacing(path: Name, *, keep_existing: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` at the end of the block, and is removed where the block fails.

    Folders on the way are made. `keep_existing`: a file that has the name by then stays, and the new one is dropped.
    Raises a UserError, naming the file, where it can't be written.
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as stream:
            yield stream
            sync(stream)
        if not keep_existing or not _link(temporary, target):
            os.replace(temporary, target)
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name, unless another file has that. False where the name is still free: on a file system
    that knows no second names."""
    with suppress(OSError):
        os.link(source, target)
    return target.exists()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `target`, absent or empty, at the end of the block; else nothing of it
    stays."""
    temporary = _beside(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        os.rename(temporary, target)  # fails where the target isn't empty any more
        sync_folder(target.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(written: Path, target: Path) -> None:
    """Give a folder its name, once all in it is on the disk. An older folder of that name is `TARGET.old` until the new
    one has the name, so whoever finds no target looks there; then it is deleted."""
    _sync_tree(written)
    old = target.with_name(f"{target.name}.old")
    try:
        os.rename(written, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # the last: a link to a folder
            raise
        os.rename(target, old)
        try:
            os.rename(written, target)
        except OSError:
            os.rename(old, target)
            raise
    sync_folder(target.absolute().parent)
    if old.exists():
        with suppress(OSError):
            remove_whole(old)


def remove_whole(folder: Path) -> None:
    """Delete a link to a folder, or a folder: under another name, so that nobody sees it half deleted."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder.rename(_beside(folder)))


@contextmanager
def replacing_together(folder: Place, names: Sequence[str]) -> Iterator[Place]:
    """A folder to write some of the files `names` into; at the end of the block these are all of `names` in `folder`.

    The folder itself stays, with whatever else is in it (logs, checkpoints). The new files are complete in its
    subfolder `PENDING` before the first old one goes, and stay there until the last new one has its place: so read them
    from where `together` says. Another program that reads the folder just then finds no `names[-1]`, which goes first
    and comes last. One writer at a time. An OSError where the files can't be written; the old ones are then there.
    """
    if isinstance(folder, Path):
        remove_leftovers(folder, re.compile(re.escape(PENDING)))
    _finish(folder, names)  # what a kill interrupted
    with _pending(folder / PENDING) as written:
        yield written
    _finish(folder, names)


@contextmanager
def _pending(target: Place) -> Iterator[Place]:
    """As `new_folder`; in object storage the last of what is written is `COMPLETE`."""
    if isinstance(target, Path):
        with new_folder(target) as written:
            yield written
        return
    target.remove_tree()
    yield target
    (target / COMPLETE).write_bytes(b"")


def together(folder: Place) -> Place:
    """Where the files of `replacing_together` lie whole."""
    pending = folder / PENDING
    whole = pending.is_dir() if isinstance(pending, Path) else (pending / COMPLETE).exists()
    return pending if whole else folder


def _finish(folder: Place, names: Sequence[str]) -> None:
    """Put complete files into their places. Done again from the start after a kill, it comes to the same end."""
    pending = together(folder)
    if pending == folder:
        return
    for name in reversed(names):
        (folder / name).unlink(missing_ok=True)
    for name in names:
        if (pending / name).exists():
            _take_over(pending / name, folder / name)
    if isinstance(pending, Path):
        sync_folder(pending.parent)
        remove_whole(pending)
    else:
        (pending / COMPLETE).unlink()
        pending.remove_tree()


def _take_over(source: Place, target: Place) -> None:
    """Give the target the source's content, at no moment a part of it."""
    if isinstance(target, Remote):
        target.write_bytes(source.read_bytes())
    elif not (isinstance(source, Path) and _link(source, target)):
        with replacing(target) as stream:
            stream.write(source.read_bytes())
