"""One model and the requests that share it, without the network.

Key idea: one thread does all work of the model, a step at a time. So requests take turns token by token, and none waits
for another's whole answer. So many are read at a time (tokenizers have much to do on long prompts), and so many
written, since each answer holds a cache; the others wait, and none for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

from megalite.inference.api import ApiError, Job, read_job
from megalite.inference.chat import Dialogue
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import Writing

MAX_READING, MAX_RUNNING = 2, 4
QUEUE_SECONDS = 120.0


class Service:
    """A model and what requests need of it. `defaults`: options of a request that doesn't say. `dialogue`: None where
    the model has no chat template."""

    def __init__(self, loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None):
        self.loaded, self.defaults, self.dialogue = loaded, defaults, dialogue
        self.created = int(time.time())
        self.max_body = max(1 << 20, 32 * loaded.context)
        self._closing = threading.Event()
        self._readers = threading.BoundedSemaphore(MAX_READING)
        self._slots = threading.BoundedSemaphore(MAX_RUNNING)
        self._model_thread = ThreadPoolExecutor(1, "model")

    def read(self, body: bytes, *, chat: bool) -> Job:
        """Raises an ApiError. Few at a time, since a tokenizer may have much to do."""
        with _place(self._readers):
            return read_job(body, chat=chat, loaded=self.loaded, defaults=self.defaults, dialogue=self.dialogue)

    def write(self, job: Job, check: Callable[[], None]) -> Iterator[Writing | list[str]]:
        """First the answers, which grow, then what becomes known of each. `check` may raise to give up.

        Raises an ApiError where too many others wait, and what the model's steps raise.
        """

        def go_on() -> None:
            if self._closing.is_set():
                raise ApiError(503, "the server is ending")
            check()

        with _place(self._slots):
            check()
            writing = Writing(
                self.loaded, job.prompts, job.options, stop=job.ends, stop_strings=job.stop_strings, check=go_on
            )
            yield writing
            steps = iter(writing)
            while (texts := self._on_model_thread(lambda: next(steps, None))) is not None:
                yield texts

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


@contextlib.contextmanager
def _place(places: threading.Semaphore) -> Iterator[None]:
    """One of some places for requests; an ApiError where none becomes free."""
    if not places.acquire(timeout=QUEUE_SECONDS):
        raise ApiError(503, "too many other requests are being answered: try again later")
    try:
        yield
    finally:
        places.release()
