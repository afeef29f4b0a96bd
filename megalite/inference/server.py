"""A small HTTP server in the form of OpenAI's API, for this machine alone.

Key idea: one thread does all work of the model, a step at a time. So requests take turns token by token, none waits for
another's whole answer, and a client that stops reading holds nothing but its own memory. What a request may cost is
bounded beforehand: bytes of its body, tokens of its prompts and answers, requests at a time, connections, time to read
and write.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from megalite.config.errors import UserError
from megalite.inference.api import ApiError, Frame, Job, read_job, usage
from megalite.inference.chat import Dialogue
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import Writing

HOST = "127.0.0.1"
MAX_RUNNING, MAX_CONNECTIONS = 4, 64
QUEUE_SECONDS, SOCKET_SECONDS = 120.0, 60.0
_LOCAL = ("127.0.0.1", "localhost")
_POSTS = {"/v1/completions": False, "/v1/chat/completions": True}  # whether it is a chat


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Service:
    """A model and what requests need of it. `defaults`: options of a request that doesn't say. `dialogue`: None where
    the model has no chat template."""

    def __init__(self, loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None):
        self.loaded, self.defaults, self.dialogue = loaded, defaults, dialogue
        self.created = int(time.time())
        self.max_body = max(1 << 20, 32 * loaded.context)
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_RUNNING)
        self._model_thread = ThreadPoolExecutor(1, "model")

    def read(self, body: bytes, *, chat: bool) -> Job:
        """Raises an ApiError."""
        return read_job(body, chat=chat, loaded=self.loaded, defaults=self.defaults, dialogue=self.dialogue)

    def write(self, job: Job, check: Callable[[], None]) -> Iterator[Writing | list[str]]:
        """First the answers, which grow, then what becomes known of each. `check` may raise to give up.

        Raises an ApiError where too many others wait, and what the model's steps raise.
        """
        if not self._slots.acquire(timeout=QUEUE_SECONDS):
            raise ApiError(503, f"{MAX_RUNNING} other requests are being answered: try again later")
        try:

            def go_on() -> None:
                if self._closing.is_set():
                    raise ApiError(503, "the server is ending")
                check()

            check()
            writing = Writing(
                self.loaded, job.prompts, job.options, stop=job.ends, stop_strings=job.stop_strings, check=go_on
            )
            yield writing
            steps = iter(writing)
            while (texts := self._on_model_thread(lambda: next(steps, None))) is not None:
                yield texts
        finally:
            self._slots.release()

    def _on_model_thread(self, step: Callable[[], list[str] | None]) -> list[str] | None:
        try:
            return self._model_thread.submit(step).result()
        except (RuntimeError, CancelledError) as error:
            if self._closing.is_set():
                raise ApiError(503, "the server is ending") from None
            raise error

    def close(self) -> None:
        """End all answers after the step that the model is at, and wait for that."""
        self._closing.set()
        self._model_thread.shutdown(cancel_futures=True)


class ApiServer(ThreadingTCPServer):
    """Listens on 127.0.0.1. `port` 0: any that is free. A UserError where it can't be had."""

    allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

    def __init__(self, service: Service, port: int):
        self.service = service
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
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
            super().process_request(request, client_address)
        else:
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
        self.server_close()
        self.service.close()


def serve(loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None, port: int) -> None:
    """Answer requests until SIGINT, or a SIGTERM that unwinds the stack (see `run_tool`)."""
    server = ApiServer(Service(loaded, defaults, dialogue), port)
    try:
        chat = "" if dialogue else " (no chat template: completions alone)"
        sys.stderr.write(f"{loaded.name} on http://{HOST}:{server.port}/v1{chat}; Ctrl-C ends it\n")
        server.serve_forever(poll_interval=0.2)
    except (KeyboardInterrupt, SystemExit):
        sys.stderr.write("the server ends\n")
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ApiServer
    protocol_version, server_version, sys_version = "HTTP/1.1", "megalite", ""
    timeout, disable_nagle_algorithm = SOCKET_SECONDS, True
    begun = False  # whether a part of the answer is on its way

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Callable[[str], None]) -> None:
        self.begun = False
        try:
            host = self.headers.get("Host", HOST).rsplit(":", 1)[0] if self.headers else HOST
            if host not in _LOCAL:  # a page of some web site that had its name point here
                self.close_connection = True
                raise ApiError(403, f"this server answers for {', '.join(_LOCAL)} alone")
            respond(self.path.partition("?")[0])
        except ApiError as error:
            self._fail(error)
        except (_ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        except UserError as error:
            self._fail(ApiError(500, str(error)))
        except Exception:
            traceback.print_exc()
            self._fail(ApiError(500, "the server failed on this request; its output says how"))

    def _get(self, path: str) -> None:
        service = self.server.service
        name = service.loaded.name
        model = {"id": name, "object": "model", "created": service.created, "owned_by": "megalite"}
        answers: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{name}": model,
        }
        if path in answers:
            self._send(200, answers[path])
        elif path in _POSTS:
            raise ApiError(405, f"{path} takes POST")
        else:
            raise ApiError(404, f"there is no {path[:100]}")

    def _post(self, path: str) -> None:
        body = self._body()
        if path not in _POSTS:
            known = path in ("/health", "/v1/models")
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
        """Raises an ApiError, and then the connection is of no more use."""
        length, most = self.headers.get("Content-Length"), self.server.service.max_body
        unusable, self.close_connection = self.close_connection, True
        if length is None or "Transfer-Encoding" in self.headers:
            raise ApiError(411, "Content-Length is missing")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "Content-Length is not a number")
        if len(length) > 18 or int(length) > most:
            self._discard(most * 16)
            raise ApiError(413, f"the body may have {most} bytes", code="request_too_large")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _ClientGone
        self.close_connection = unusable
        return body

    def _discard(self, most: int) -> None:
        """Take what the client is sending, since it reads no answer before that; within bounds."""
        end = time.monotonic() + 5.0
        left = min(int(self.headers["Content-Length"][:18]), most)
        while left > 0 and time.monotonic() < end:
            part = self.rfile.read(min(left, 1 << 16))
            if not part:
                return
            left -= len(part)

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
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
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
        """Raises where the client has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                raise _ClientGone
        except OSError:
            raise _ClientGone from None
