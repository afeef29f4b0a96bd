"""A place has one live owner, and a dead one is in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.files.owner import OWNER, check_unowned, owning

HOLD = "import sys\nfrom pathlib import Path\nfrom megalite.files.owner import owning\n"
HOLD += "with owning(Path(sys.argv[1]), '--save run'):\n    print('held', flush=True)\n    sys.stdin.read()\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run" / OWNER


@pytest.fixture
def other(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the place."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_owner_is_refused_and_told_who_the_first_is(other: subprocess.Popen[str], file: Path) -> None:
    with pytest.raises(UserError) as caught, owning(file, "--save run"):
        pass
    for word in ("--save run", f"process {other.pid} on host {socket.gethostname()}, since 20"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match="is used by another run"):
        check_unowned(file, "--save run", but_mine=True)
    other.communicate("")  # ends it
    assert not file.exists()
    with owning(file, "--save run"):
        check_unowned(file, "--save run", but_mine=True)
    assert not file.exists()


def test_a_killed_owner_is_replaced(other: subprocess.Popen[str], file: Path) -> None:
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected by its parent
    check_unowned(file, "--save run")
    with owning(file, "--save run"):
        assert file.read_text().startswith(f"process {os.getpid()} on host")


def test_one_process_does_not_own_a_place_twice(file: Path) -> None:
    with owning(file, "--save run"):
        with pytest.raises(UserError, match="is used by another run"), owning(file, "--save run"):
            pass
        with pytest.raises(UserError, match="is used by another run"):
            check_unowned(file, "--save run")
        assert file.exists()


def test_an_owner_that_ends_while_another_waits_for_its_lock_does_not_make_two(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed between our opening and our locking: the lock of a file that is gone protects nothing."""
    real, removed = fcntl.flock, []

    def late(descriptor: int, kind: int) -> None:
        if not removed:
            removed.append(file.unlink())
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with owning(file, "--save run"):
        assert file.exists()
        with pytest.raises(UserError, match="is used by another run"):
            check_unowned(file, "--save run")


def test_a_full_disk_is_told_and_leaves_no_owner(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(UserError, match=f"cannot write {file}: No space left"), owning(file, "--save run"):
            pass
    with owning(file, "--save run"):
        check_unowned(file, "--save run", but_mine=True)


def test_a_file_system_without_locks_is_warned_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(UserWarning, match="--save run: no second run is kept from writing there"),
        owning(file, "--save run"),
    ):
        pass


def test_an_owner_is_gone_after_a_failure(file: Path) -> None:
    with pytest.raises(RuntimeError), owning(file, "--save run"):
        raise RuntimeError
    assert list(file.parent.iterdir()) == []
