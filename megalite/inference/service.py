"""One model and the requests that share it, without the network.

Key idea: one thread does all work of the model, a step at a time. So requests take turns token by token, and none waits
for another's whole answer. As many are written at once as there are places and memory for their keys and values; the
others wait in line, and none for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from megalite.estimate.memory import free_machine_memory
from megalite.inference.api import ApiError, Job, read_job
from megalite.inference.chat import Dialogue
from megalite.inference.generate import GenerationCache
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import Writing

MAX_READING, MAX_RUNNING, MAX_REQUESTS = 2, 4, 64
MAX_BODIES = 16  # of the largest size, in memory at once
QUEUE_SECONDS = 120.0
_BUSY = "too many other requests are being answered: try again later"
_ENDING = "the server is shutting down"


class Step(NamedTuple):
    """What one step has made known of each answer: more text, and how it ended if it has. `tokens`: of all so far."""

    texts: list[str]
    finishes: list[str | None]
    tokens: int


class Service:
    """A model and what requests need of it. `defaults`: options of a request that doesn't say. `dialogue`: None where
    the model has no chat template. `memory`: bytes that keys and values of all requests together may take."""

    def __init__(self, loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None, memory: int):
        self.name, self.can_chat = loaded.name, dialogue is not None
        self.max_body = max(1 << 20, 32 * loaded.context)
        self.room = memory // GenerationCache(loaded.model, tokens=1, batch=1).nbytes  # tokens
        self._loaded = loaded
        self._read = partial(read_job, loaded=loaded, defaults=defaults, dialogue=dialogue, room=self.room)
        # Few prompts are tokenized at a time, since a tokenizer may have much to do.
        self._readers, self._model = ThreadPoolExecutor(MAX_READING, "reader"), ThreadPoolExecutor(1, "model")
        self._requests = self._running = self._tokens = 0
        self.body_bytes = 0  # of all requests that come or are answered
        self._line, self._freed = asyncio.Lock(), asyncio.Event()
        self._closing = False

    def refuse_too_much(self, body: bytearray) -> None:
        """Raises an ApiError for a body that is too large, alone or with those of other requests."""
        if len(body) > self.max_body:
            raise ApiError(413, f"the request body may have at most {self.max_body} bytes", code="request_too_large")
        if self.body_bytes > MAX_BODIES * self.max_body:
            raise ApiError(503, _BUSY)

    async def read(self, body: bytes, *, chat: bool) -> Job:
        """Raises an ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(self._read, body, chat=chat))

    async def write(self, job: Job) -> AsyncGenerator[Step]:
        """Answer step by step, at least one. Raises an ApiError where too many others wait, and what the model's steps
        raise."""
        if self._requests >= MAX_REQUESTS:
            raise ApiError(503, _BUSY)
        self._requests += 1
        try:
            await self._enter(job.tokens)
            loop, gone = asyncio.get_running_loop(), threading.Event()
            steps = self._steps(job, gone)

            def leave() -> None:
                steps.close()
                loop.call_soon_threadsafe(self._leave, job.tokens)

            try:
                while (step := await loop.run_in_executor(self._model, next, steps, None)) is not None:
                    yield step
            finally:
                gone.set()
                self._model.submit(leave)  # behind a step that may still run: until then its memory is in use
        finally:
            self._requests -= 1

    def _steps(self, job: Job, gone: threading.Event) -> Generator[Step]:
        """Runs on the model's thread alone."""

        def go_on() -> None:
            if self._closing or gone.is_set():
                raise ApiError(503, _ENDING)

        writing = Writing(
            self._loaded, job.prompts, job.options, stop=job.ends, stop_strings=job.stop_strings, check=go_on
        )
        for texts in writing:
            yield Step(texts, [result.finish for result in writing.results], writing.tokens)

    async def _enter(self, tokens: int) -> None:
        """Wait for a place and memory: first come, first served, so that no large request starves."""
        try:
            async with asyncio.timeout(QUEUE_SECONDS), self._line:
                while self._running == MAX_RUNNING or self._tokens + tokens > self.room:
                    if self._closing:
                        raise ApiError(503, _ENDING)
                    self._freed.clear()
                    await self._freed.wait()
                self._running += 1
                self._tokens += tokens
        except TimeoutError:
            raise ApiError(503, _BUSY) from None

    def _leave(self, tokens: int) -> None:
        self._running -= 1
        self._tokens -= tokens
        self._freed.set()

    def stop(self) -> None:
        """End all answers after the step that the model is at. On the event loop's thread."""
        self._closing = True
        self._freed.set()

    def close(self) -> None:
        """Wait for the threads: one that let go of a tensor while the interpreter ends would be ended in the midst of
        torch, which aborts the process."""
        self._closing = True
        for pool in (self._readers, self._model):
            pool.shutdown(cancel_futures=True)


def free_memory(device: torch.device) -> int:
    """Bytes that are free where the model is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_machine_memory()
