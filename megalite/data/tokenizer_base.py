"""What every tokenizer is: the interface that the rest of the package sees, and text from a growing list of ids.

The key ideas: ids of `eod`, `bos` and `pad` are structure, not text, and `detokenize` leaves them out; all other ids
become text again. And who wrote a text decides what a special token's text (`<|im_end|>`) in it is: a prompt or a chat
template writes the token (`tokenize`), a document or a message writes plain text (`tokenize_alone`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import UserError
from megalite.data.jsonl import NONCHARACTERS
from megalite.files import lfs

MARK = NONCHARACTERS[6]  # begins and ends the name of a special token, see `marked`


class Tokenizer(ABC):
    """Text to ids and back.

    `vocab_size` is the largest possible id + 1. `eod` ends a document, `bos` begins one, `pad` fills up a batch; each
    is None where the tokenizer has no such id. `special`: the texts that `tokenize` reads as special tokens, and their
    ids. `added`: the texts that `tokenize` reads as one token each, whether special or not. `parse_special_tokens`:
    special tokens are such in documents and messages too, as the user asked.
    """

    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    pad: int | None = None
    special: Mapping[str, int] = {}
    added: Mapping[str, int] = {}
    parse_special_tokens: bool = False

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, in one thread: special tokens written out become their ids, and the tokenizer's own
        template applies (such as Llama 3's leading `<|begin_of_text|>`), as in `transformers`."""

    def tokenize_alone(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Ids of each text without the tokenizer's own template. `special`: whether special tokens written out become
        their ids; else they are plain text, but for those written as `marked` does."""
        return self.tokenize_batch(texts)

    def marked(self, token: str) -> str:
        """How a special token is written in a text whose other special tokens are plain text."""
        return f"{MARK}{self._secret} {self.special[token]}{MARK}"

    @functools.cached_property
    def _secret(self) -> str:
        """Makes the names of special tokens such as no text can hold. Ids don't depend on it."""
        return secrets.token_hex(8)

    def with_special(self, tokens: Collection[str]) -> Tokenizer:
        """The same tokenizer, for which these of its `added` tokens are special too."""
        assert not tokens, "a kind of tokenizer without `added` tokens"
        return self

    def fingerprint(self) -> str:
        """Hash of all that ids depend on, but for the version of the tokenizer's library: as loaded, whatever files it
        came from."""
        roles = [self.vocab_size, self.eod, self.bos, self.pad, self.parse_special_tokens, sorted(self.special.items())]
        return hashlib.blake2b(json.dumps(roles).encode() + self._content()).hexdigest()

    def _content(self) -> bytes:
        """What the library was built of; nothing where there is none."""
        return b""

    def is_control(self, token: int) -> bool:
        """Whether this id ends a document or is a token of its own, which ordinary text doesn't hold."""
        return token == self.eod or token in self.special.values()

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids that are all in the vocabulary and none of `eod`, `bos`, `pad`."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text, as `tokenize_batch`."""
        return self.tokenize_batch([text])[0]

    def template(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own template puts before and after every text; usually none."""
        around = self.tokenize("")
        probe = self.tokenize("0") if around else []
        ways = ((around[:n], around[n:]) for n in range(len(around), -1, -1))
        return next((a, b) for a, b in ways if probe[: len(a)] == a and probe[len(probe) - len(b) :] == b)

    def is_open(self, token: int) -> bool:
        """Whether the ids that follow this one may change its text, even where that looks complete."""
        return False

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
    together with some before it, since a decoder may treat the first id apart (a leading space).
    """

    WINDOW = 64  # ids that are decoded again with each new one, where that is possible

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()) -> None:
        """`context`: ids that precede (a prompt); their text isn't returned."""
        self.tokenizer = tokenizer
        self.ids = list(context)[-16:]
        self.shown = tokenizer.detokenize(self.ids)

    def add(self, token: int) -> str:
        """Text that this id completes, perhaps empty."""
        self.ids.append(token)
        if self.tokenizer.is_open(token):
            return ""
        text = self.tokenizer.detokenize(self.ids)
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """Text still held back."""
        return self._show(self.tokenizer.detokenize(self.ids))

    def _show(self, text: str) -> str:
        while not text.startswith(self.shown):  # a character that the context left incomplete
            self.shown = self.shown[:-1]
        new, self.shown = text[len(self.shown) :], text
        if len(self.ids) > self.WINDOW:
            # The text ends with a complete character, so the last id is context enough, if it has text of its own: a
            # decoder takes what follows none for the beginning.
            last = self.tokenizer.detokenize(self.ids[-1:])
            if last.strip():
                self.ids, self.shown = self.ids[-1:], last
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
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}") from None
    if lfs.is_pointer(content):
        raise UserError(f"{flag} {path}: {lfs.WRONG}")
    return content


def first_line(error: BaseException) -> str:
    """The beginning of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
