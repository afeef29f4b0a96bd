"""Whether every rank is there: the meeting at the start, and the watch from then on.

Key idea: each rank keeps one connection to rank 0. The kernel closes it when the process dies, however it dies, so
nobody needs a collective's timeout to learn of it. Rank 0 then tells the others which rank it was.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megalite.config.errors import UserError

_GREETING = struct.Struct("!16sI")  # the meeting's token, the rank
_NEWS = struct.Struct("!i")  # the rank that was lost, or:
_GO, _GOODBYE, _CALL = -1, -2, -3
_KEY = "megalite/meeting"
_MASTER = "master"  # in place of an address: the one that each machine has for the master
_PAUSE = 0.05  # seconds between two looks
_TRY = 5.0  # seconds for one connection

Connections = Mapping[int, socket.socket]
"""rank → connection: of rank 0 to all others, of every other rank to rank 0"""


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def open_store(address: str, port: int, rank: int, deadline: float) -> dist.Store:
    """The key-value store that rank 0, or torchrun, serves at `address`. Raises OSError where nobody does until then.

    The port is tried from here first: torch's own attempts print a C++ trace each.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = rank == 0 and not served
    while not host:
        try:
            socket.create_connection((address, port), timeout=_remaining(deadline)).close()
            break
        except OSError:
            if time.monotonic() + _PAUSE >= deadline:
                raise
            time.sleep(_PAUSE)
    store = dist.TCPStore(address, port, is_master=host, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"/worker/attempt_{attempt}", store) if served else store


def meet(store: dist.Store, rank: int, world_size: int, toward: tuple[str, int], deadline: float) -> Connections:
    """Return once all ranks are here. `toward`: where the store is served, as this machine names it. Raises UserError
    where they aren't here at `deadline` (of `time.monotonic`), or as soon as one is gone again."""
    if rank != 0:
        return {0: _join(store, rank, toward[0], deadline)}
    token = secrets.token_bytes(16)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both) as listener:
        store.set(_KEY, f"{_own_address(toward)} {listener.getsockname()[1]} {token.hex()}")
        connections = _gather(listener, token, world_size, deadline)
    for connection in connections.values():
        _tell(connection, _GO)
    return connections


def store_of_meeting(store: dist.Store) -> dist.Store:
    """A part of the store that only those have who met last: torchrun keeps it when machines come or go, and process
    groups are made from what their ranks write there."""
    return dist.PrefixStore(store.get(_KEY).decode(), store)


def _own_address(toward: tuple[str, int]) -> str:
    """The address from which this machine reaches `toward`; `_MASTER` where only this machine knows it by that."""
    with socket.create_connection(toward, timeout=_TRY) as probe:
        address = str(probe.getsockname()[0])
    return _MASTER if ipaddress.ip_address(address).is_loopback else address


def _gather(listener: socket.socket, token: bytes, world_size: int, deadline: float) -> dict[int, socket.socket]:
    """The connections of all other ranks."""
    found: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(found) < world_size - 1:
            ready = selector.select(_remaining(deadline))
            for key, _ in ready:
                if key.data is not None:  # nothing is sent yet: it is gone
                    raise UserError(f"rank {key.data} ended while the processes were starting")
                connection, _ = listener.accept()
                other = _greeted(connection, token)
                if other is None:
                    connection.close()
                else:
                    found[other] = connection
                    selector.register(connection, selectors.EVENT_READ, other)
            if not ready and time.monotonic() >= deadline:
                missing = [str(rank) for rank in range(1, world_size) if rank not in found]
                shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                raise UserError(f"missing: rank {shown}")
    return found


def _greeted(connection: socket.socket, token: bytes) -> int | None:
    """The rank at the other end; None where it isn't one of this run."""
    connection.settimeout(_TRY)
    try:
        theirs, rank = _GREETING.unpack(_receive(connection, _GREETING.size))
    except (OSError, struct.error):
        return None
    return int(rank) if secrets.compare_digest(theirs, token) else None


def _join(store: dist.Store, rank: int, master: str, deadline: float) -> socket.socket:
    """A connection to rank 0, over which it said that all are there.

    torchrun keeps the store when machines come or go, so that an address in it may be of a rank 0 that is gone. It is
    read again where nobody answers.
    """
    reason = ""
    while time.monotonic() < deadline:
        if store.check([_KEY]):
            published = store.get(_KEY)
            try:
                connection = _greet(published.decode(), rank, master, deadline)
            except OSError as error:
                reason = f" ({error})"
            else:
                if _heard(connection) == _GO:
                    return connection
                connection.close()
                if not _replaced(store, published):
                    raise UserError("rank 0 ended while the processes were starting")
        time.sleep(_PAUSE)
    raise UserError(f"missing: rank 0{reason}")


def _greet(published: str, rank: int, master: str, deadline: float) -> socket.socket:
    """A connection to where rank 0 says that it listens, over which it was told who this is."""
    host, port, token = published.split()
    place = (master if host == _MASTER else host, int(port))
    connection = socket.create_connection(place, timeout=min(_TRY, _remaining(deadline)))
    connection.sendall(_GREETING.pack(bytes.fromhex(token), rank))
    connection.settimeout(_remaining(deadline) + 2.0)  # rank 0 gives up first, and knows who is missing
    return connection


def _replaced(store: dist.Store, published: bytes) -> bool:
    """Whether rank 0 has published another place since."""
    try:
        return bool(store.get(_KEY) != published)
    except RuntimeError:  # rank 0 served the store too
        return False


def _receive(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer where the other end is gone."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def _tell(connection: socket.socket, news: int) -> None:
    with contextlib.suppress(OSError):  # it is gone, which its own connection shows
        connection.sendall(_NEWS.pack(news))


def _heard(connection: socket.socket) -> int | None:
    """What the other end said; None where it is gone."""
    try:
        return int(_NEWS.unpack(_receive(connection, _NEWS.size))[0])
    except (OSError, struct.error):
        return None


class Watch:
    """Calls `on_loss(rank)`, once and from a thread, when another rank is gone without a goodbye; and `on_call()`, from
    the same thread, when another rank calls all."""

    def __init__(self, connections: Connections, on_loss: Callable[[int], None]):
        self._connections, self._on_loss = connections, on_loss
        self.on_call: Callable[[], None] = lambda: None
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
            connection.settimeout(30.0)
            _notice_dead_machines(connection)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self.thread = threading.Thread(target=self._listen, name="watch over the ranks", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        to_pass_on = 0 not in self._connections  # rank 0 has the connections to all others
        while self._selector.get_map():
            for key, _ in self._selector.select():
                news = _heard(self._connections[key.data])
                if news == _CALL:
                    if to_pass_on:
                        self.call()
                        to_pass_on = False
                    self.on_call()
                    continue
                self._selector.unregister(key.fileobj)
                if news != _GOODBYE:
                    lost = key.data if news is None else news
                    for connection in self._connections.values():
                        _tell(connection, lost)
                    self._on_loss(lost)
                    return

    def call(self) -> None:
        """Call all other ranks. Some are called twice where several call."""
        for connection in self._connections.values():
            _tell(connection, _CALL)

    def close(self) -> None:
        """Say goodbye. The connections stay open until this process ends: the others may have to read it."""
        for connection in self._connections.values():
            _tell(connection, _GOODBYE)


def _notice_dead_machines(connection: socket.socket) -> None:
    """Have the kernel ask every 10 s whether the other machine is there, and give up after about a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):  # not every system lets a program choose
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
