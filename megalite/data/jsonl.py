"""Reads labelled examples: JSON objects, one a line or all in one list, any keys.

The key idea: a line carries its file and number, so that whatever is found wrong with it later, far from the file, is
told by file and line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from megalite.config.errors import UserError
from megalite.data.text_input import COMPRESSED, read_chunks

# Code points that Unicode reserves for a program's own use and that no text holds: signs between the writer of a text
# and its encoder.
NONCHARACTERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6"


Progress = Callable[[int], object]
"""Is told of bytes of a file, as it lies on disk, that were read."""


@dataclass(frozen=True)
class Line:
    """A JSON object and where it begins; `number` counts lines from 1."""

    path: str
    number: int
    value: dict[str, Any]

    def error(self, message: str) -> UserError:
        """An error that names file and line."""
        return UserError(f"{self.path}:{self.number}: {message}")


def read_lines(path: str, flag: str, progress: Progress | None = None) -> Iterator[Line]:
    """The objects of a `.jsonl` file (also `.json`, and `.gz` or `.zst` after it), blank lines left out; or those of a
    file that is one JSON list of objects, which is read whole.

    `flag`: what named the file. Raises UserError with file and line for a line that isn't a JSON object in UTF-8, or
    whose strings aren't Unicode text.
    """
    name = PurePath(path)
    suffix = PurePath(name.stem).suffix if name.suffix.lower() in COMPRESSED else name.suffix
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder: give the files in it")
    if suffix.lower() not in (".jsonl", ".json"):
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
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Line(path, data.count(b"\n", 0, error.start) + 1, {}).error("not UTF-8") from None
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    place = text.index("[")
    line = Line(path, text.count("\n", 0, place) + 1, {})
    while text[place : place + 1] in ("[", ","):
        begin = _after_blanks(text, place + 1)
        line = replace(line, number=line.number + text.count("\n", place, begin))
        if text[begin : begin + 1] == "]":
            place = begin
            break
        with _json_errors(line):
            value, end = decoder.raw_decode(text, begin)
        yield _checked(line, value, text[begin:end])
        place = _after_blanks(text, end)
        line = replace(line, number=line.number + text.count("\n", begin, place))
    if text[place : place + 1] != "]":
        raise line.error("broken JSON: a comma or the end of the list is missing")
    if _after_blanks(text, place + 1) < len(text):
        raise line.error("broken JSON: something follows the end of the list")


def _after_blanks(text: str, place: int) -> int:
    """The first place from `place` on that isn't blank."""
    found = re.compile(r"\S").search(text, place)
    return len(text) if found is None else found.start()


def shown(value: object) -> str:
    """The beginning of a JSON value, for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


class _RepeatedKeyError(ValueError):
    """An object has a key twice, so one of its values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        raise _RepeatedKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return value


@contextmanager
def _json_errors(line: Line) -> Iterator[None]:
    """What is wrong with JSON becomes a UserError that names file and line."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise line.error(f"not UTF-8: byte 0x{byte:02x} at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise line.error(f"broken JSON: {error.msg} (column {error.colno})") from None
    except _RepeatedKeyError as error:
        raise line.error(f"the key {shown(error.args[0])} occurs twice in an object") from None
    except (ValueError, RecursionError) as error:
        raise line.error(f"broken JSON: {error}") from None


def _parse(path: str, number: int, data: bytes) -> Line:
    line = Line(path, number, {})
    with _json_errors(line):
        source = data.decode("utf-8")
        value = json.loads(source, object_pairs_hook=_object)
    return _checked(line, value, source)


def _checked(line: Line, value: Any, source: str) -> Line:
    """The line with its value, which must be an object whose strings are text. `source`: its JSON."""
    if not isinstance(value, dict):
        raise line.error(f"it must be a JSON object, not {shown(value)}")
    if not source.isascii() or "\\u" in source:
        _check_text(line, json.dumps(value, ensure_ascii=False))
    return replace(line, value=value)


def _check_text(line: Line, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise line.error(f"it holds {half}, half of a surrogate pair, which is not valid text") from None
    found = next((sign for sign in NONCHARACTERS if sign in text), None)
    if found is not None:
        raise line.error(f"it holds U+{ord(found):04X}, which is not a character")
