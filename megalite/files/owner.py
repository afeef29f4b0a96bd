"""Which run writes a place: a file that it keeps locked, and that says who it is.

Key idea: the operating system drops a lock with the process that holds it, however that ended, so nobody has to find
out whether an owner still lives, and nothing has to be cleared up after a kill. It holds between machines too where
their file system shares locks (NFS does; others may need a mount option).
"""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megalite.config.errors import UserError
from megalite.files.remote import Place, Remote
from megalite.files.remote_owner import check_unowned_remote, owning_remote

OWNER = ".owner"
"""Name of the file in a folder that a run owns."""


@contextmanager
def owning(file: Place, place: str) -> Iterator[None]:
    """The block owns a place: `file` says so until it ends. `place`: what to call it, as the user wrote it.

    A UserError names the other run where one owns it.
    """
    if isinstance(file, Remote):
        with owning_remote(file, place):
            yield
        return
    descriptor = _claim(file, place)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the lock goes: whoever locks it next sees that it isn't the place's any more
        os.close(descriptor)


def check_unowned(file: Place, place: str, *, but_mine: bool = False) -> None:
    """Raise a UserError where a run owns the place. `but_mine`: this process's own is fine."""
    if isinstance(file, Remote):
        return check_unowned_remote(file, place, but_mine=but_mine)
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    try:
        if not _lock(descriptor, fcntl.LOCK_SH, place) and not (
            but_mine and _text(descriptor).startswith(f"{_myself()},")
        ):
            raise _used(descriptor, place)
    finally:
        os.close(descriptor)


def _claim(file: Path, place: str) -> int:
    """Own a place from now on; the descriptor that holds the lock."""
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror or error}") from None
        try:
            if not _lock(descriptor, fcntl.LOCK_EX, place):
                raise _used(descriptor, place)
            if _is_at(descriptor, file):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{_myself()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}\n".encode())
                return descriptor
        except OSError as error:  # a full disk
            os.close(descriptor)
            raise UserError(f"cannot write {file}: {error.strerror or error}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner has just removed it


def _is_at(descriptor: int, file: Path) -> bool:
    """Whether the open file still has the name `file`: its owner may have removed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, kind: int, place: str) -> bool:
    """Lock an open file; False where another run has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(f"{place}: no second run is kept from writing there: {error.strerror or error}", stacklevel=3)
    return True


def _used(descriptor: int, place: str) -> UserError:
    who = _text(descriptor) or "it has just started"
    return UserError(f"{place} is used by another run ({who}): choose another, or wait until it ends")


def _myself() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
