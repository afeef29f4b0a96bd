"""A server of the S3 protocol on this machine, and runs against it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.files.remote import Remote, RemoteError, place

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """moto's server in a process of its own, which ends with the block or with this process; the environment by which
    clients find it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", _SERVER], text=True, **pipes) as server:  # type: ignore[call-overload]
        port = next(line.strip() for line in server.stdout if line.strip().isdigit())
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        server.kill()


def environment() -> dict[str, str]:
    """By what processes find the server that this one knows."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def at(address: str) -> Remote:
    """A place in the server's bucket."""
    found = place(address)
    assert isinstance(found, Remote)
    return found


def fetch(address: str, folder: Path) -> Path:
    """A copy of a folder of objects, with those in its folders, on the disk."""
    folder.mkdir(parents=True)
    for each in at(address).iterdir():
        if each.is_dir():
            fetch(str(each), folder / each.name)
        else:
            (folder / each.name).write_bytes(each.read_bytes())
    return folder


def put(file: Path, address: str) -> None:
    """Store a file in a folder of objects."""
    (at(address) / file.name).write_bytes(file.read_bytes())


@contextmanager
def down_from(operation: int) -> Iterator[list[int]]:
    """The store answers until the given operation, and to none after it: as if the writer were killed there."""
    asked, count = Remote._asked, [0]

    @contextmanager
    def counted(self: Remote) -> Iterator[Any]:
        count[0] += 1
        if count[0] >= operation:
            raise RemoteError(5, "the store is down", str(self))
        with asked(self) as store:
            yield store

    with mock.patch.object(Remote, "_asked", counted):
        yield count
