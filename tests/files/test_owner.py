"""A place has one live owner, and a dead one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import UserError
from megalite.files import owner
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
        with pytest.raises(UserError, match="is used by another run"), owning(file, "--save run"):
            pass
        assert file.exists()


@pytest.fixture
def elsewhere(file: Path) -> Path:
    """The file of an owner on another machine."""
    with owning(file, "--save run"):
        text = file.read_text()
    file.write_text(text)
    edit(file, host="elsewhere", machine="another boot")
    return file


def age(file: Path, seconds: float) -> None:
    """Its last sign of life was so long ago."""
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_an_owner_on_another_machine_lives_until_it_was_silent_for_minutes(elsewhere: Path) -> None:
    age(elsewhere, owner.SILENCE - 60)
    with pytest.raises(UserError, match="--save run is used by another run .*on host elsewhere.* 5 minutes later"):
        check_unowned(elsewhere, "--save run")
    assert os.listdir(elsewhere.parent) == [OWNER]
    age(elsewhere, owner.SILENCE + 60)
    with owning(elsewhere, "--save run"):
        assert json.loads(elsewhere.read_text())["host"] == socket.gethostname()
    assert os.listdir(elsewhere.parent) == []


def test_a_container_on_the_same_host_is_another_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owning(file, "--save run"):
        edit(file, pid=2**22 + 1)  # a process that this container doesn't have
        check_unowned(file, "--save run")
        monkeypatch.setattr(os, "readlink", lambda _: "pid:[1]")
        with pytest.raises(UserError, match="is used by another run"):
            check_unowned(file, "--save run")


@pytest.mark.parametrize("lives", [True, False])
def test_a_new_run_waits_until_it_knows_of_an_owner_elsewhere(
    lives: bool, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        age(elsewhere, 0 if lives else owner.SILENCE - 20 + sum(slept))

    age(elsewhere, owner.SILENCE - 20)
    monkeypatch.setattr(time, "sleep", sleep)
    refused = pytest.raises(UserError, match="elsewhere") if lives else nullcontext()
    with pytest.warns(UserWarning, match="waiting up to 20 s to see"), refused, owning(elsewhere, "run"):
        pass
    assert elsewhere.exists() == lives


def test_a_living_owner_gives_signs_of_life_and_none_for_another(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT", 0.001)
    with owning(file, "--save run"):
        age(file, 1000)
        while time.time() - file.stat().st_mtime > 500:
            time.sleep(0.001)
        edit(file, claim="another's")
        age(file, 1000)
        time.sleep(0.02)
        assert time.time() - file.stat().st_mtime > 500
    assert file.exists()


def test_two_machines_that_find_one_dead_owner_do_not_both_own_the_place(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine replaces the owner between our look and our removal, where locks hold nobody back."""
    age(elsewhere, owner.SILENCE + 60)
    quicker = json.dumps(json.loads(elsewhere.read_text()) | {"host": "quicker", "claim": "its own"})
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        source.unlink()
        source.write_text(quicker)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(UserError, match="on host quicker"), owning(elsewhere, "--save run"):
        pass
    assert (os.listdir(elsewhere.parent), elsewhere.read_text()) == ([OWNER], quicker)


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
