"""The HTTP server in the form of OpenAI's API, for this machine alone: Starlette on uvicorn.

Key idea: the libraries speak HTTP, and what they leave open is bounded here. Only local names and pages are answered, a
body has a limit, a client that lets the server wait too long is dropped, and an idle one gives way to a new one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megalite.config.errors import FlagError, UserError
from megalite.inference.api import ApiError, Job
from megalite.inference.chat import Dialogue
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.service import Service, Step, free_memory

HOST, LOCAL_NAMES = "127.0.0.1", ("127.0.0.1", "localhost")
MAX_CONNECTIONS = 128
WAIT_SECONDS = 30  # for a client, in a row: to send a whole request, or to take what there is of the answer
PROBE_SECONDS = 0.5
_POSTS = {"/v1/completions": False, "/v1/chat/completions": True}  # whether it is a chat


def serve(
    loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None, port: int, memory: float | None
) -> None:
    """Answer requests until SIGINT, or a SIGTERM that unwinds the stack (see `run_tool`). `memory`: GiB for keys and
    values; default half of what is free."""
    if memory is None:
        memory = free_memory(loaded.model.output_weight.device) / 2 / 2**30
    service = Service(loaded, defaults, dialogue, int(memory * 2**30))
    if service.room < 2:
        raise FlagError(f"--serve-memory {memory:.3g} GiB is too little for two tokens of this model: give more")
    try:
        listener = listen(port)
        url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        message = '{"messages": [{"role": "user", "content": "Hello"}]}'
        path, body = ("chat/completions", message) if dialogue else ("completions", '{"prompt": "Hello"}')
        sys.stderr.write(
            f"{loaded.name} on {url}{'' if dialogue else ' (no chat template: only completions)'}; Ctrl-C stops it\n"
            f"try: curl {url}/{path} -d '{body}'\n"
            f"KV cache for {service.room} tokens of all requests together: {memory:.3g} GiB (--serve-memory)\n"
        )
        Server(service).run([listener])
    except (KeyboardInterrupt, SystemExit):
        sys.stderr.write("the server ends\n")
    finally:
        service.close()


def listen(port: int) -> socket.socket:
    """On 127.0.0.1. `port` 0: any that is free. A UserError where it can't be had."""
    try:
        return socket.create_server((HOST, port), backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--serve {port}: {reason}; choose another port, or 0 for any free port") from None


class Server(uvicorn.Server):
    """uvicorn with this server's bounds. `run` returns once all answers have ended; the service is not closed."""

    def __init__(self, service: Service):
        self.service = service
        calls: dict[str, Any] = {"http": Connection, "callback_notify": self.drop_slow_clients, "timeout_notify": 0}
        plain: dict[str, Any] = {"ws": "none", "loop": "asyncio", "lifespan": "off", "proxy_headers": False}
        quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(build_app(service), timeout_graceful_shutdown=5, **calls, **plain, **quiet))

    async def drop_slow_clients(self) -> None:
        """Called once a second."""
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.seconds_waiting = connection.seconds_waiting + 1 if connection.waits_for_client() else 0
            if connection.seconds_waiting > WAIT_SECONDS:
                connection.drop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stop()
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """uvicorn's connection, which by itself waits for a client for ever, and takes one that has sent all for gone."""

    seconds_waiting = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others: set[Any] = self.connections
        waiting = [one for one in others if one.waits_for_client()]
        if len(others) >= MAX_CONNECTIONS and waiting:
            max(waiting, key=lambda one: one.seconds_waiting).drop()
        super().connection_made(transport)

    def waits_for_client(self) -> bool:
        """For a request, for the rest of one, or for the client to read."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def drop(self) -> None:
        """Close without regard to what is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def on_response_complete(self) -> None:
        self.seconds_waiting = 0
        super().on_response_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to stay. A client that has sent all may still read; only writing shows whether it is gone."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def _probe(self) -> None:
        """HTTP lets a server say 100 at any time before an answer. A connection that is closed is reset by that."""
        if not (self.transport.is_closing() or self.cycle.response_started) and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(PROBE_SECONDS, self._probe)


def build_app(service: Service) -> Starlette:
    """All that the server answers."""
    model = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "megalite"}
    pages: dict[str, Any] = {
        "/health": {"status": "ok"},
        "/v1/models": {"object": "list", "data": [model]},
        f"/v1/models/{service.name}": model,
    }
    posts = [path for path, chat in _POSTS.items() if service.can_chat or not chat]
    pages["/"] = {"model": service.name, "GET": ["/", *pages], "POST": posts}

    async def page(request: Request) -> Response:
        if request.scope["path"] not in pages:
            raise HTTPException(404)
        return _json(pages[request.scope["path"]])

    routes = [Route(path, partial(_answer, service, chat=chat), methods=["POST"]) for path, chat in _POSTS.items()]
    routes += [Route(path, page) for path in ("/", "/health", "/v1/models", "/v1/models/{name:path}")]
    handlers = dict.fromkeys((ApiError, UserError, HTTPException, ClientDisconnect, Exception), _refuse)
    return Starlette(routes=routes, middleware=[Middleware(_local_only)], exception_handlers=handlers)


def _local_only(app: ASGIApp) -> ASGIApp:
    """Refuses web pages: those of other sites, and those of a site that had its name point here (DNS rebinding)."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers, names = Headers(scope=scope), ", ".join(LOCAL_NAMES)
        problem = None
        if not _is_local(f"//{headers.get('host', HOST)}"):
            problem = ApiError(403, f"Host: this server only answers requests to {names}")
        elif not all(map(_is_local, headers.getlist("origin"))):
            problem = ApiError(403, f"Origin: this server only answers web pages of {names}")
        await (_json(problem.body, 403) if problem else app)(scope, receive, send)

    return guarded


def _is_local(url: str) -> bool:
    try:
        return urlsplit(url).hostname in LOCAL_NAMES
    except ValueError:
        return False


def _json(value: dict[str, Any], status: int = 200, headers: Any = None) -> Response:
    return Response(json.dumps(value), status, headers, "application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    problem, headers = _problem(error), None
    if isinstance(error, HTTPException):  # of the library: no such path, or another method
        path, headers = request.scope["path"][:100], error.headers
        takes = "POST" if path in _POSTS else "GET"
        problem = ApiError(error.status_code, f"{path} takes {takes}" if headers else f"there is no {path}")
    return _json(problem.body, problem.status, headers)


def _problem(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    known = isinstance(error, UserError)
    return ApiError(500, str(error) if known else "the server failed on this request; see the server's output")


async def _answer(service: Service, request: Request, *, chat: bool) -> Response:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            service.body_bytes += len(part)
            service.refuse_too_much(body)
        return await _while_connected(request, _work(service, bytes(body), chat=chat))
    finally:
        service.body_bytes -= len(body)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's result; the work is cancelled where the client goes away."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _work(service: Service, body: bytes, *, chat: bool) -> Response:
    job = await service.read(body, chat=chat)
    steps = service.write(job)
    first = await anext(steps)  # what is refused until here has a status of its own in a stream too
    if job.stream:
        return _Events(_events(job, first, steps))
    texts, last = first.texts, first
    async for last in steps:
        texts = [before + new for before, new in zip(texts, last.texts, strict=True)]
    return _json(job.answer(texts, last.finishes, last.tokens))


class _Events(StreamingResponse):
    """Server-sent events. Their source is closed with them, whether all were sent or not."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def _events(job: Job, first: Step, steps: AsyncGenerator[Step]) -> AsyncGenerator[str]:
    if job.chat:
        yield _event(job.chunk(0, "", role="assistant"))
    step: Step | None = first
    ended: set[int] = set()
    async with aclosing(steps):
        try:
            while step is not None:
                for index, (text, finish) in enumerate(zip(step.texts, step.finishes, strict=True)):
                    if text:
                        yield _event(job.chunk(index, text))
                    if finish is not None and index not in ended:
                        ended.add(index)
                        yield _event(job.chunk(index, "", finish))
                tokens, step = step.tokens, await anext(steps, None)
        except (ApiError, UserError) as error:
            yield _event(_problem(error).body)
            return
    if job.include_usage:
        yield _event(job.counts(tokens))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
