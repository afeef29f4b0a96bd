"""Which run writes a place in object storage: an object that says who it is.

Key idea: a store has no locks, so the object stays when its run is killed, and whoever comes next has to find out
whether the owner still lives. That is sure only on the owner's own machine, which knows its processes, and where a
scheduler starts the same job again, which it does once the former is gone. All else is told, and left to the user.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megalite.config.errors import UserError
from megalite.files.remote import Remote


@dataclass(frozen=True)
class _Owner:
    """`machine`: what no two machines, or containers, share. `born`: when the process began, in the kernel's ticks, so
    that another one of the same number isn't taken for it. `job`: of the scheduler; empty where there is none."""

    host: str
    machine: str
    process: int
    born: str
    job: str
    since: str

    def __str__(self) -> str:
        job = f" of {self.job}" if self.job else ""
        return f"process {self.process} on host {self.host}{job}, since {self.since}"

    def is_dead(self) -> bool:
        """Whether it is gone for sure."""
        if self.machine == _machine():
            return _born(self.process) != self.born
        return self.job != "" and self.job == _job()

    def is_me(self) -> bool:
        return (self.machine, self.process, self.born) == (_machine(), os.getpid(), _born(os.getpid()))


@contextmanager
def owning_remote(file: Remote, place: str) -> Iterator[None]:
    """As `owning`, of a place in object storage."""
    _claim(file, place)
    try:
        yield
    finally:
        with suppress(OSError):
            owner = _read(file)
            if owner is not None and owner.is_me():
                file.unlink(missing_ok=True)


def check_unowned_remote(file: Remote, place: str, *, but_mine: bool = False) -> None:
    """As `check_unowned`, of a place in object storage."""
    owner = _read(file)
    if owner is not None and not owner.is_dead() and not (but_mine and owner.is_me()):
        raise _used(file, place, owner)


def _claim(file: Remote, place: str) -> None:
    now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}"
    me = _Owner(socket.gethostname(), _machine(), os.getpid(), _born(os.getpid()), _job(), now)
    while True:
        try:
            file.write_bytes((json.dumps(asdict(me)) + "\n").encode(), new=True)
            return
        except FileExistsError:
            owner = _read(file)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror or error}") from None
        if owner is not None:  # else it has just gone
            if not owner.is_dead():
                raise _used(file, place, owner)
            file.unlink(missing_ok=True)


def _read(file: Remote) -> _Owner | None:
    try:
        return _Owner(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} doesn't say which run owns this place: delete it if none does") from None


def _used(file: Remote, place: str, owner: _Owner) -> UserError:
    return UserError(
        f"{place} is used by another run ({owner}): choose another, or wait until it ends. If it has ended already, "
        f"killed on its machine, delete {file}"
    )


def _machine() -> str:
    """This start of this machine, and the container that numbers its processes; where neither is known, the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _born(process: int) -> str:
    """When a process of this machine began; empty where there is none."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() or not _is_alive(process) else "alive"
    return "" if words[0] in "ZX" else words[19]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _job() -> str:
    """The scheduler's name of this job, which stays the same when it starts it again."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":  # torchrun's default
        return f"torchrun {run}"
    names = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return f"SLURM job {'.'.join(names)}" if names[0] else ""
