"""Which run writes a place: a file that says so while the run lives.

Key idea: the file names a process by host, id and start time, so whether its run still lives can be asked, and nobody
has to remove it after a kill. The rules: an owner that lives is never disturbed. On this host an owner whose process is
gone is replaced. On another host that can't be seen from here: then the owner counts as living, unless it is an earlier
start of the same Slurm job, of which Slurm runs one at a time; the message says which file to delete.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megalite.config.errors import UserError
from megalite.files.atomic import replacing

OWNER = ".owner"
"""Name of the file in a folder that a run owns."""


@contextmanager
def owning(file: Path, place: str) -> Iterator[None]:
    """The block owns a place: `file` says so until it ends. `place`: what to call it, as the user wrote it.

    A UserError names the other run where one owns it that lives, or may live.
    """
    mine = claim(file, place)
    try:
        yield
    finally:
        release(file, mine)


def claim(file: Path, place: str) -> str:
    """Own a place from now on; what to `release` it with. Raises as `owning`."""
    mine = _describe_self()
    with _alone_in(file.absolute().parent):
        check_unowned(file, place)
        file.unlink(missing_ok=True)
        with replacing(file, keep_existing=True) as stream:  # another host may be as quick
            stream.write(mine.encode())
        if _text(file) != mine:
            check_unowned(file, place)
    return mine


def release(file: Path, mine: str) -> None:
    """Own a place no longer, if it is still ours."""
    if _text(file) == mine:
        with suppress(OSError):
            file.unlink()


def check_unowned(file: Path, place: str, *, but_mine: bool = False) -> None:
    """Raise a UserError where a run owns the place that lives, or may live. `but_mine`: this process's own is fine."""
    text = _text(file)
    if text is None:
        return
    owner = _parse(text)
    if owner is None:
        raise UserError(f"{file} says that another run writes {place}, but can't be read: if none does, delete {file}")
    here = owner["host"] == socket.gethostname()
    if but_mine and here and owner["pid"] == os.getpid() and owner["start"] == process_start(os.getpid()):
        return
    who = f"process {owner['pid']} on host {owner['host']}, since {owner['since']}"
    if here:
        start = process_start(owner["pid"])
        if start is not None and start == owner["start"]:
            raise UserError(f"{place} is written by another run ({who}): choose another, or wait for its end")
    elif not _restarted(owner):
        raise UserError(
            f"{place} is written by another run ({who}); whether that still runs can't be seen from this host. "
            f"Choose another, or if it has ended, delete {file}"
        )


def process_start(pid: int) -> str | None:
    """When a process of this host started, in a form that no other process of the host shares; None where it is gone.

    Where the system doesn't tell (no /proc), an empty text for any process that is there.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "" if _answers(pid) else None
    try:
        # Behind the name, which may hold anything: the state is field 3 of proc(5), the start in ticks field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _describe_self() -> str:
    values = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        **_slurm(),
        "claim": secrets.token_hex(8),  # two claims of one process differ
    }
    return json.dumps(values, indent=2) + "\n"


def _slurm() -> dict[str, Any]:
    """The Slurm job and how often it was started again; empty values outside of one."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {"slurm_job": os.environ.get("SLURM_JOB_ID"), "restarts": int(restarts) if restarts.isdigit() else 0}


def _restarted(owner: Mapping[str, Any]) -> bool:
    """Whether this process is of a later start of the owner's Slurm job."""
    mine = _slurm()
    return mine["slurm_job"] is not None and (
        mine["slurm_job"] == owner.get("slurm_job") and mine["restarts"] > owner.get("restarts", 0)
    )


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None


def _parse(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    known = isinstance(values, dict) and all(name in values for name in ("host", "pid", "start", "since"))
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
