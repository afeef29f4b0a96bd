"""What every tokenizer is: the interface that the rest of the package sees, and text from a growing list of ids.

The key idea: ids of `eod`, `bos` and `pad` are structure, not text, and `detokenize` leaves them out; all other ids
become text again.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import UserError


class Tokenizer(ABC):
    """Text to ids and back.

    `vocab_size` is the largest possible id + 1. `eod` ends a document, `bos` begins one, `pad` fills up a batch; each
    is None where the tokenizer has no such id.
    """

    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    pad: int | None = None

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, in one thread. Nothing is appended beyond what the tokenizer's own template adds."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids that are all in the vocabulary and none of `eod`, `bos`, `pad`."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.tokenize_batch([text])[0]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ids, without `eod`, `bos` and `pad`. Broken UTF-8 becomes U+FFFD; an unknown id is a ValueError."""
        structure = (self.eod, self.bos, self.pad)
        kept = [int(i) for i in ids if i not in structure]
        for i in kept:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size} ids")
        return self._decode(kept)


class IncrementalDetokenizer:
    """Turns a growing list of ids into text piece by piece: the pieces joined are `detokenize` of the whole list.

    Text is held back while its last character is incomplete (byte-level ids split characters), and every id is decoded
    together with those before it, since a decoder may treat the first id apart (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()) -> None:
        """`context`: ids that precede (a prompt); their text isn't returned."""
        self.tokenizer = tokenizer
        self.ids = list(context)[-16:]
        self.start = 0
        # A character that the context leaves incomplete belongs to what follows.
        self.shown = len(tokenizer.detokenize(self.ids).rstrip("\ufffd"))

    def add(self, token: int) -> str:
        """Text that this id completes, perhaps empty."""
        self.ids.append(token)
        text = self.tokenizer.detokenize(self.ids[self.start :])
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """Text still held back."""
        return self._show(self.tokenizer.detokenize(self.ids[self.start :]))

    def _show(self, text: str) -> str:
        new, self.shown = text[self.shown :], len(text)
        # A short tail is enough context for the next id; it starts after a complete character.
        if len(self.ids) - self.start > 64 and new:
            self.start = len(self.ids) - 1
            self.shown = len(self.tokenizer.detokenize(self.ids[self.start :]))
        return new


def load_library(package: str) -> Any:
    """The module of a library that only this kind of tokenizer needs. A UserError where it isn't installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"this tokenizer needs the Python package {package}: pip install {package} ({error})") from None


def read_file(flag: str, path: str) -> bytes:
    """A whole file. A UserError that names flag and file where it can't be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}") from None


def first_line(error: BaseException) -> str:
    """The beginning of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
