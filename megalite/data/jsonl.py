"""Reads labelled examples: JSON objects, one a line or all in one list, any keys.

The key idea: a line carries its file and number, so an error that is found later, far from the file, still names file
and line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megalite.config.errors import FlagError, UserError
from megalite.data.text_input import check_unicode, excerpt, parse_json, read_chunks, suffix_of

# Code points that Unicode reserves for a program's own use, so no text holds them: marks that the code that writes a
# text leaves for the code that encodes it.
NONCHARACTERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6"
_NEXT_OF_LIST = re.compile(r"[^\s,]")  # in a list that is known to be valid

Progress = Callable[[int], object]
"""Is called with the number of bytes that were read of a file, compressed as it is on disk."""


@dataclass(frozen=True)
class Line:
    """A JSON object and where it begins; `number` counts lines from 1."""

    path: str
    number: int
    value: dict[str, Any]

    @property
    def keys(self) -> str:
        """For a message."""
        return ", ".join(list(self.value)[:8]) or "none"

    def text(self, key: str) -> str:
        """The value of a key. A UserError where it isn't a string."""
        value = self.value[key]
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {excerpt(value)}")
        return value

    def error(self, message: str) -> UserError:
        """An error that names file and line."""
        return _error(self.path, self.number, message)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Have a UserError of the block name file and line, but for one of flags."""
        try:
            yield
        except FlagError:
            raise
        except UserError as error:
            already = str(error).startswith(f"{self.path}:{self.number}: ")
            raise error if already else self.error(str(error)) from None


def read_lines(path: str, flag: str, progress: Progress | None = None) -> Iterator[Line]:
    """The objects of a `.jsonl` file (also `.json`, and `.gz` or `.zst` after it), blank lines left out; or those of a
    file that is one JSON list of objects, which is read whole.

    `flag`: what named the file. Raises UserError with file and line for a line that isn't a JSON object in UTF-8, or
    whose strings aren't Unicode text.
    """
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder: give the files in it")
    if suffix_of(path) not in (".jsonl", ".json"):
        raise UserError(f"{flag} {path}: JSON lines are needed (.jsonl, .json, + .gz, .zst)")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {path}: no such file")
    chunks = read_chunks([path])
    for chunk in chunks:
        if chunk.first_line == 1 and chunk.data.lstrip().startswith(b"["):
            yield from _objects_of_list(path, b"".join([chunk.data, *(rest.data for rest in chunks)]))
            return
        for number, data in enumerate(chunk.data.split(b"\n"), start=chunk.first_line):
            if data and not data.isspace():
                yield _parse(path, number, data)
        if progress is not None:
            progress(chunk.progress)


def _objects_of_list(path: str, data: bytes) -> Iterator[Line]:
    """The objects of a file that is one JSON list."""
    line = 1
    try:
        text = data.decode("utf-8")
        count = len(json.loads(text))
    except UnicodeDecodeError as error:
        raise _error(path, data.count(b"\n", 0, error.start) + 1, "not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _error(path, error.lineno, f"broken JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _error(path, line, f"broken JSON: {error}") from None
    decoder = json.JSONDecoder()
    end = text.index("[") + 1
    line += text.count("\n", 0, end)
    for _ in range(count):
        begin = _NEXT_OF_LIST.search(text, end).start()  # type: ignore[union-attr]
        line += text.count("\n", end, begin)
        _, end = decoder.raw_decode(text, begin)
        yield _parse(path, line, text[begin:end].encode())
        line += text.count("\n", begin, end)


def _parse(path: str, number: int, data: bytes) -> Line:
    """An object, whose strings must be text."""
    try:
        value = parse_json(data, _object)
        if not isinstance(value, dict):
            raise ValueError(f"it must be a JSON object, not {excerpt(value)}")
        if not data.isascii() or b"\\u" in data:
            _check_text(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise _error(path, number, str(error)) from None
    return Line(path, number, value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # one of its values would be lost
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {excerpt(repeated)} occurs twice in an object")
    return value


def _check_text(text: str) -> None:
    check_unicode(text, "it")
    found = next((sign for sign in NONCHARACTERS if sign in text), None)
    if found is not None:
        raise ValueError(f"it holds U+{ord(found):04X}, which is not a character")


def _error(path: str, number: int, message: str) -> UserError:
    return UserError(f"{path}:{number}: {message}")
