"""A place has one live owner, and a dead one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import UserError
from megalite.files.owner import OWNER, check_unowned, owning, process_start

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
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_second_live_owner_is_refused_and_told_who_the_first_is(other: subprocess.Popen[str], file: Path) -> None:
    since = json.loads(file.read_text())["since"]
    with pytest.raises(UserError) as caught, owning(file, "--save run"):
        pass
    for word in ("--save run", f"process {other.pid} on host {socket.gethostname()}", since):
        assert word in str(caught.value)
    with pytest.raises(UserError):
        check_unowned(file, "--save run", but_mine=True)
    other.communicate("")  # ends it
    with owning(file, "--save run"):
        check_unowned(file, "--save run", but_mine=True)
    assert not file.exists()


def test_a_killed_owner_is_replaced(other: subprocess.Popen[str], file: Path) -> None:
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected by its parent
    assert process_start(other.pid) is None
    with owning(file, "--save run"):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_process_that_only_has_the_number_of_the_owner_s_is_not_the_owner(file: Path) -> None:
    with owning(file, "--save run"):
        edit(file, start="another boot/1")
        with owning(file, "--save run"):
            pass


def test_one_process_does_not_own_a_place_twice(file: Path) -> None:
    with owning(file, "--save run"):
        with pytest.raises(UserError, match="is written by another run"), owning(file, "--save run"):
            pass
        assert file.exists()


def test_an_owner_on_another_host_stays_and_the_message_says_what_to_delete(file: Path) -> None:
    with owning(file, "--save run"):
        edit(file, host="elsewhere")
        with pytest.raises(UserError, match=f"on host elsewhere.* if it has ended, delete {file}"):
            check_unowned(file, "--save run")


def test_a_slurm_job_that_was_started_again_elsewhere_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with owning(file, "--save run"):
        edit(file, host="elsewhere")
        with pytest.raises(UserError, match="elsewhere"):
            check_unowned(file, "--save run")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        check_unowned(file, "--save run")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_an_owner_file_that_cannot_be_read_is_named(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match=f"delete {file}"), owning(file, "--save run"):
        pass


def test_an_owner_is_gone_after_a_failure(file: Path) -> None:
    with pytest.raises(RuntimeError), owning(file, "--save run"):
        raise RuntimeError
    assert list(file.parent.iterdir()) == []
