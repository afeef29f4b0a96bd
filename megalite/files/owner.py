"""Which run writes a place: a file that says so while the run lives.

Key idea: the file names a process, and a thread of that process touches it every half minute. So it can be asked from
anywhere whether the owner still lives, and nobody has to remove the file after a kill. On the same machine the process
itself is looked for, and a dead one is replaced at once. On another machine, or in another container, an owner has
ended when its file was not touched for five minutes, by the clock of the file system.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from megalite.config.errors import UserError
from megalite.files.atomic import replacing

OWNER = ".owner"
"""Name of the file in a folder that a run owns."""

BEAT = 30.0
"""Seconds between two signs of life."""

SILENCE = 300.0
"""Seconds without one after which an owner on another machine has ended."""


@contextmanager
def owning(file: Path, place: str) -> Iterator[None]:
    """The block owns a place: `file` says so until it ends. `place`: what to call it, as the user wrote it.

    A UserError names the other run where one owns it that lives. Where that can't be told at once, as the owner is on
    another machine, this waits for a sign of life, `SILENCE` seconds at most.
    """
    mine = _claim(file, place)
    ended = Event()
    thread = Thread(target=_give_signs, args=(file, mine, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if _text(file) == mine:
            with suppress(OSError):
                file.unlink()


def check_unowned(file: Path, place: str, *, but_mine: bool = False, wait: bool = False) -> str | None:
    """Raise a UserError where a run owns the place that lives, or may live; else the text of an owner that has ended.

    `but_mine`: this process's own is fine. `wait`: for a sign of life of an owner on another machine.
    """
    text = _text(file)
    if text is None:
        return None
    owner = _parse(text)
    if owner is None:
        raise UserError(f"{file} marks {place} as in use, but can't be read: if no run uses it, delete {file}")
    who = f"process {owner['pid']} on host {owner['host']}, since {owner['since']}"
    if owner["machine"] == _machine():
        alive = process_start(owner["pid"]) == owner["start"]
        if alive and not (but_mine and owner["pid"] == os.getpid()):
            raise UserError(f"{place} is used by another run ({who}): choose another, or wait until it ends")
    elif not _fell_silent(file, f"{place}: {who}", wait=wait):
        raise UserError(
            f"{place} is used by another run ({who}): choose another, or wait until it ends; if it was killed, try "
            f"again {SILENCE / 60:.0f} minutes later"
        )
    return text


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in ticks since it was booted; None where it is gone.

    Where the system doesn't tell (no /proc), an empty text for any process that is there.
    """
    if not Path("/proc/self/stat").exists():
        return "" if _answers(pid) else None
    try:
        # Behind the name, which may hold anything: the state is field 3 of proc(5), the start field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _machine() -> str:
    """Where a process's id means what it means here: this boot of this host, and this container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _describe_self() -> str:
    values = {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "claim": secrets.token_hex(8),  # two claims of one process differ
    }
    return json.dumps(values, indent=2) + "\n"


def _claim(file: Path, place: str) -> str:
    """Own a place from now on; what the file then holds."""
    mine = _describe_self()
    check_unowned(file, place, wait=True)
    with _alone_in(file.absolute().parent):
        ended = check_unowned(file, place)
        if ended is not None:
            _remove(file, ended)
        with replacing(file, keep_existing=True) as stream:  # another machine may be as quick
            stream.write(mine.encode())
        if _text(file) != mine:
            check_unowned(file, place)
            raise UserError(f"another run has just started to use {place}: choose another")
    return mine


def _remove(file: Path, ended: str) -> None:
    """Remove the file of an owner that has ended, and not that of a run on another machine that was quicker."""
    aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}.ended")
    with suppress(FileNotFoundError):
        os.rename(file, aside)
        if _text(aside) != ended and not file.exists():
            os.rename(aside, file)
        aside.unlink(missing_ok=True)


def _give_signs(file: Path, mine: str, ended: Event) -> None:
    """Touch the file now and then, as long as it is ours. That a file system is away for a while ends nothing."""
    while not ended.wait(BEAT):
        with suppress(OSError, UserError):
            if _text(file) == mine:
                os.utime(file)


def _fell_silent(file: Path, who: str, *, wait: bool) -> bool:
    """Whether the owner has given no sign of life for so long that it must have ended. `wait`: until that is known."""
    silent = _silence(file)
    if wait and silent < SILENCE:
        warnings.warn(f"{who}: waiting up to {SILENCE - silent:.0f} s to see if it is still alive", stacklevel=2)
    while wait and silent < SILENCE:
        time.sleep(min(BEAT / 3, SILENCE - silent))
        before, silent = silent, _silence(file)
        if silent < before:
            return False
    return silent >= SILENCE


def _silence(file: Path) -> float:
    """Seconds since the file was touched. The clock is that of a file made beside it now: the file server's, if any."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, prefix=f"{file.name}.") as now:
            return os.fstat(now.fileno()).st_mtime - file.stat().st_mtime
    except FileNotFoundError:  # its owner has just removed it
        return math.inf
    except OSError as error:
        raise UserError(f"cannot write {file.parent}: {error.strerror or error}") from None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None


def _parse(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    known = isinstance(values, dict) and {"host", "machine", "pid", "start", "since"} <= values.keys()
    return values if known else None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process of this host is in such a block: of two that find a dead owner one comes first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
