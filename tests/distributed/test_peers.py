"""The meeting of the ranks and the watch over them, with threads in place of processes: a death closes a socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megalite.config.errors import UserError
from megalite.distributed import peers
from megalite.distributed.peers import Connections, Watch, meet, store_of_meeting

SIZE = 4
Told = queue.Queue[tuple[int, int]]
"""(who, whom it lost)"""


@pytest.fixture
def place() -> Iterator[tuple[str, int]]:
    """Where the store would be served."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def start_meeting(ranks: list[int], place: tuple[str, int], seconds: float = 30.0) -> list[Connections | UserError]:
    store, deadline = dist.HashStore(), time.monotonic() + seconds

    def one(rank: int) -> Connections | UserError:
        try:
            return meet(store, rank, SIZE, place, deadline)
        except UserError as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(one, ranks))


def watched(place: tuple[str, int], *, dead: int | None = None) -> tuple[list[Connections], Told, list[Watch]]:
    """All ranks after their meeting, the watches of those that aren't `dead`, and what they are told."""
    met = [each for each in start_meeting(list(range(SIZE)), place) if not isinstance(each, UserError)]
    assert [sorted(each) for each in met] == [[1, 2, 3], [0], [0], [0]]
    told: Told = queue.Queue()
    watches = [
        Watch(each, lambda lost, rank=rank: told.put((rank, lost)))  # type: ignore[misc]
        for rank, each in enumerate(met)
        if rank != dead
    ]
    return met, told, watches


@pytest.mark.parametrize("dead", [0, 2])
def test_every_rank_is_told_of_a_rank_that_ends_without_a_goodbye(dead: int, place: tuple[str, int]) -> None:
    met, told, watches = watched(place, dead=dead)
    for connection in met[dead].values():
        connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that dies
    news = sorted(told.get(timeout=30) for _ in watches)
    assert news == [(rank, dead) for rank in range(SIZE) if rank != dead]


@pytest.mark.parametrize("caller", [0, 2])
def test_a_call_reaches_every_other_rank_and_the_watch_goes_on(caller: int, place: tuple[str, int]) -> None:
    met, told, watches = watched(place, dead=3)
    called = [threading.Event() for _ in watches]
    for watch, event in zip(watches, called, strict=True):
        watch.on_call = event.set
    watches[caller].call()
    for event in (called[rank] for rank in range(3) if rank != caller):
        assert event.wait(30)
    for connection in met[3].values():
        connection.shutdown(socket.SHUT_RDWR)
    assert sorted(told.get(timeout=30) for _ in watches) == [(rank, 3) for rank in range(3)]


def test_what_ranks_wrote_after_an_earlier_meeting_is_not_seen(place: tuple[str, int]) -> None:
    """torchrun keeps its store and the number of the attempt when a machine is lost or comes."""
    store, deadline = dist.HashStore(), time.monotonic() + 30
    places = []
    for _ in range(2):
        connections = meet(store, 0, 1, place, deadline)
        assert connections == {}
        places.append(store_of_meeting(store))
        assert not places[-1].check(["address of rank 1"])
        places[-1].set("address of rank 1", "here")
    assert places[0].check(["address of rank 1"])


def test_nobody_is_told_of_ranks_that_say_goodbye(place: tuple[str, int]) -> None:
    met, told, watches = watched(place)
    for watch in watches:
        watch.close()
    for watch in watches:
        watch.thread.join(30)
        assert not watch.thread.is_alive()
    for each in met:
        for connection in each.values():
            connection.close()
    assert told.empty()


def test_a_meeting_ends_at_its_bound_and_names_who_is_missing(place: tuple[str, int]) -> None:
    first, second = start_meeting([0, 2], place, seconds=0.3)
    assert str(first) == "missing: rank 1, 3"
    assert isinstance(second, UserError)


def test_a_rank_that_ends_while_others_are_awaited_ends_the_meeting(
    place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = peers._heard

    def dying(connection: socket.socket) -> int | None:
        connection.close()
        return None

    monkeypatch.setattr(peers, "_heard", dying)
    first, _ = start_meeting([0, 2], place)
    monkeypatch.setattr(peers, "_heard", real)
    assert str(first) == "rank 2 ended while the processes were starting"


def test_a_stranger_is_no_rank(place: tuple[str, int]) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert peers._greeted(ours, bytes(16)) is None


def test_where_the_masters_name_is_a_loopback_address_the_others_use_their_own_for_it() -> None:
    """As with `127.0.1.1 node0` in the hosts file of the first machine."""
    store, deadline = dist.HashStore(), time.monotonic() + 30
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as threads:
        port = server.getsockname()[1]
        first = threads.submit(meet, store, 0, 2, ("127.0.0.1", port), deadline)
        other = threads.submit(meet, store, 1, 2, ("127.0.0.2", port), deadline)
        assert set(first.result()) == {1}
        assert other.result()[0].getpeername()[0] == "127.0.0.2"


class Read:
    """A store that tells when the address in it is read."""

    def __init__(self, store: dist.Store):
        self.store, self.first = store, threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        self.first.set()
        return self.store.get(key)


@pytest.mark.parametrize("taken", [False, True], ids=["nobody listens there", "another process listens there"])
def test_an_address_of_a_rank_0_that_is_gone_is_read_again(taken: bool, place: tuple[str, int]) -> None:
    store, deadline = dist.HashStore(), time.monotonic() + 30
    read = Read(store)
    with socket.create_server(("127.0.0.1", 0)) as stale, ThreadPoolExecutor(2) as threads:
        published = f"127.0.0.1 {stale.getsockname()[1]} {'00' * 16}"
        store.set(peers._KEY, published)
        if not taken:
            stale.close()
        other = threads.submit(meet, read, 1, 2, place, deadline)  # type: ignore[arg-type]
        stranger = stale.accept()[0] if taken else None
        assert read.first.wait(30)
        first = threads.submit(meet, store, 0, 2, place, deadline)
        while store.get(peers._KEY).decode() == published:
            time.sleep(0.01)
        if stranger is not None:
            stranger.close()
        assert set(first.result()) == {1} and set(other.result()) == {0}
