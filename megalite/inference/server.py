"""A small HTTP server in the form of OpenAI's API, for this machine alone.

Key idea: a client costs no more than was bounded beforehand: connections, bytes of a body, time to read and write. An
answer keeps its place among those being written until its client has taken it, so a client that reads too slowly is
dropped once it has let the server wait for WRITE_SECONDS in all. What is said in HTTP is said properly, errors too.
"""

from __future__ import annotations

import contextlib
import io
import json
import select
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

from megalite.config.errors import UserError
from megalite.inference.api import ApiError, Frame, Job, usage
from megalite.inference.chat import Dialogue
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.service import Service
from megalite.inference.text import Writing

HOST = "127.0.0.1"
MAX_CONNECTIONS = 64
SOCKET_SECONDS = 60.0
WRITE_SECONDS = 30.0  # of waiting for a client to take its answer, beyond what the system's buffers hold
LINGER_SECONDS = 5.0
_LOCAL = ("127.0.0.1", "localhost")
_POSTS = {"/v1/completions": False, "/v1/chat/completions": True}  # whether it is a chat


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


class ApiServer(ThreadingTCPServer):
    """Listens on 127.0.0.1. `port` 0: any that is free. A UserError where it can't be had."""

    allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

    def __init__(self, service: Service, port: int):
        self.service = service
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._handlers: dict[threading.Thread, Any] = {}  # with the connection of each
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--serve {port}: {reason}; choose another port, or 0 for any that is free") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
            self._handlers = {known: its for known, its in self._handlers.items() if known.is_alive()}
            self._handlers[thread] = request
            thread.start()
        else:
            with contextlib.suppress(OSError):
                _refuse(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no fault of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            traceback.print_exc()

    def close(self) -> None:
        """End all answers and connections, and their threads: one that let go of the model while the interpreter ends
        would be ended in the midst of torch, which aborts the process."""
        self.server_close()
        self.service.close()
        handlers = list(self._handlers.items())
        for seconds in (1.0, 5.0):  # first time to tell the clients
            end = time.monotonic() + seconds
            for thread, connection in handlers:
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


def _refuse(connection: socket.socket) -> None:
    """Tell a client that there are too many. What it has sent is taken first, since closing on it would reset the
    connection, and with it the answer."""
    connection.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        connection.recv(1 << 16)
    error = ApiError(503, f"there are {MAX_CONNECTIONS} connections already: try again later")
    body = json.dumps(error.body()).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def serve(loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None, port: int) -> None:
    """Answer requests until SIGINT, or a SIGTERM that unwinds the stack (see `run_tool`)."""
    server = ApiServer(Service(loaded, defaults, dialogue), port)
    try:
        chat = "" if dialogue else " (no chat template: completions alone)"
        url = f"http://{HOST}:{server.port}/v1"
        sys.stderr.write(f"{loaded.name} on {url}{chat}; Ctrl-C ends it\n")
        message = '{"messages": [{"role": "user", "content": "Hello"}]}'
        path, body = ("chat/completions", message) if dialogue else ("completions", '{"prompt": "Hello"}')
        sys.stderr.write(f"try: curl {url}/{path} -d '{body}'\n")
        server.serve_forever(poll_interval=0.2)
    except (KeyboardInterrupt, SystemExit):
        sys.stderr.write("the server ends\n")
    finally:
        server.close()


class _PatientWriter(io.BufferedIOBase):
    """Writes to a connection. `seconds`: of waiting for the client that are left, all writes together; then a
    TimeoutError."""

    def __init__(self, connection: socket.socket):
        self.connection, self.seconds = connection, WRITE_SECONDS

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        begin = time.monotonic()
        self.connection.settimeout(max(self.seconds, 0.001))
        try:
            self.connection.sendall(data)
        finally:
            self.seconds -= time.monotonic() - begin
            self.connection.settimeout(SOCKET_SECONDS)
        return len(data)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ApiServer
    protocol_version, server_version, sys_version = "HTTP/1.1", "megalite", ""
    default_request_version = "HTTP/1.0"  # of what is no request: its answer has a status line too
    timeout, disable_nagle_algorithm = SOCKET_SECONDS, True

    def setup(self) -> None:
        super().setup()
        self.wfile = self.writer = _PatientWriter(self.connection)

    def handle_one_request(self) -> None:
        self.begun = False  # whether a part of the answer is on its way
        self.unread = True  # whether the client may have sent more than was read
        self.half_closed = False
        self.writer.seconds = WRITE_SECONDS
        super().handle_one_request()

    def finish(self) -> None:
        super().finish()
        if self.unread:
            with contextlib.suppress(OSError):
                self._linger()

    def _linger(self) -> None:
        """Take what the client still sends, within bounds: closing on it would reset the connection, and with it the
        answer that the client has yet to read."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGER_SECONDS / 5)
        left, end = 16 * self.server.service.max_body, time.monotonic() + LINGER_SECONDS
        while left > 0 and time.monotonic() < end and (part := self.connection.recv(1 << 16)):
            left -= len(part)

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Callable[[str, bytes], None]) -> None:
        try:
            host = self.headers.get("Host", HOST).rsplit(":", 1)[0]
            if host.lower() not in _LOCAL:  # a page of some web site that had its name point here
                self.close_connection = True
                raise ApiError(403, f"this server answers for {', '.join(_LOCAL)} alone")
            respond(self._asked(), self._body())
        except ApiError as error:
            self._fail(error)
        except (_ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        except UserError as error:
            self._fail(ApiError(500, str(error)))
        except Exception:
            traceback.print_exc()
            self._fail(ApiError(500, "the server failed on this request; its output says how"))

    def _asked(self) -> str:
        """The path that is asked for."""
        return unquote(self.path.partition("?")[0])

    def _get(self, path: str, _: bytes) -> None:
        answers = self._pages()
        if path in answers:
            self._send(200, answers[path])
        elif path in _POSTS:
            raise ApiError(405, f"{path} takes POST")
        else:
            raise ApiError(404, f"there is no {path[:100]}")

    def _pages(self) -> dict[str, dict[str, Any]]:
        """What there is to read, by path."""
        service = self.server.service
        name = service.loaded.name
        model = {"id": name, "object": "model", "created": service.created, "owned_by": "megalite"}
        answers: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{name}": model,
        }
        posts = [path for path, chat in _POSTS.items() if service.dialogue or not chat]
        return {"/": {"model": name, "GET": ["/", *answers], "POST": posts}, **answers}

    def _post(self, path: str, body: bytes) -> None:
        if path not in _POSTS:
            known = path in self._pages()
            raise ApiError(405 if known else 404, f"{path} takes GET" if known else f"there is no {path[:100]}")
        service = self.server.service
        job = service.read(body, chat=_POSTS[path])
        frame = Frame(job.chat, uuid.uuid4().hex, int(time.time()), service.loaded.name)
        steps = service.write(job, self._check_client)
        try:
            if job.stream:
                self._stream(job, frame, steps)
                return
            writing = next(steps)
            assert isinstance(writing, Writing)
            for _ in steps:
                pass
            choices = [(result.text, result.finish) for result in writing.results]
            self._send(200, frame.whole(choices, usage(job, writing.tokens)))
        finally:
            steps.close()  # type: ignore[attr-defined]

    def _body(self) -> bytes:
        """What a POST must have and any other request may. Raises an ApiError, and then the connection is of no more
        use."""
        length, most = self.headers.get("Content-Length"), self.server.service.max_body
        if length is None and self.command != "POST":
            length = "0"
        unusable, self.close_connection = self.close_connection, True
        if length is None or "Transfer-Encoding" in self.headers:
            raise ApiError(411, "Content-Length is missing")
        if len(set(self.headers.get_all("Content-Length", []))) > 1:
            raise ApiError(400, "Content-Length is said twice, and differently")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "Content-Length is not a number")
        if len(length) > 18 or int(length) > most:
            raise ApiError(413, f"the body may have {most} bytes", code="request_too_large")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ApiError(400, f"the body ends after {len(body)} of {length} bytes")
        self.close_connection, self.unread = unusable, False
        return body

    def _stream(self, job: Job, frame: Frame, steps: Iterator[Writing | list[str]]) -> None:
        """Server-sent events; the connection ends with them, as they have no length."""
        writing = next(steps)
        assert isinstance(writing, Writing)
        self.close_connection = self.begun = True
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if job.chat:
            self._event(frame.first())
        ended: set[int] = set()
        for texts in steps:
            assert isinstance(texts, list)
            for index, text in enumerate(texts):
                finish = writing.results[index].finish
                if text:
                    self._event(frame.piece(index, text))
                if finish is not None and index not in ended:
                    ended.add(index)
                    self._event(frame.last(index, finish))
        if job.include_usage:
            self._event(frame.counts(usage(job, writing.tokens)))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.begun = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", "POST" if self._asked() in _POSTS else "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, error: ApiError) -> None:
        """The error as an answer, or as an event where the answer has begun."""
        try:
            if self.begun:
                self.close_connection = True
                self._event(error.body())
            else:
                self._send(error.status, error.body())
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library itself refuses: broken requests, unknown methods."""
        self.close_connection = True
        self._fail(ApiError(int(code), message or explain or "bad request"))

    def _check_client(self) -> None:
        """Raises where the client has closed the connection.

        One that will send no more may still read. Which of the two it is shows once something is sent to it, since a
        closed connection is then reset. HTTP lets a server say 100 at any time before an answer.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            for _, state in poll.poll(0):
                if state & (select.POLLERR | select.POLLHUP):
                    raise _ClientGone
                if not self.half_closed and not self.connection.recv(1, socket.MSG_PEEK):
                    self.half_closed = True
                    if not self.begun and self.request_version >= "HTTP/1.1":
                        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        except OSError:
            raise _ClientGone from None
