"""Reads JSON lines of labelled examples: one object a line, any keys.

The key idea: a line carries its file and number, so that whatever is found wrong with it later, far from the file, is
told by file and line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megalite.config.errors import UserError
from megalite.data.text_input import COMPRESSED, read_chunks

# Code points that Unicode reserves for a program's own use and that no text holds: signs between the writer of a text
# and its encoder.
NONCHARACTERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"


@dataclass(frozen=True)
class Line:
    """A JSON object and where it stands; `number` counts from 1."""

    path: str
    number: int
    value: dict[str, Any]

    def error(self, message: str) -> UserError:
        """An error that names file and line."""
        return UserError(f"{self.path}:{self.number}: {message}")


def read_lines(path: str, flag: str) -> Iterator[Line]:
    """The objects of a `.jsonl` file (also `.json`, and `.gz` or `.zst` after it), blank lines left out.

    `flag`: what named the file. Raises UserError with file and line for a line that isn't a JSON object in UTF-8, or
    whose strings aren't Unicode text.
    """
    name = PurePath(path)
    suffix = PurePath(name.stem).suffix if name.suffix.lower() in COMPRESSED else name.suffix
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder: name its files")
    if suffix.lower() not in (".jsonl", ".json"):
        raise UserError(f"{flag} {path}: JSON lines are needed (.jsonl, .json, + .gz, .zst)")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {path}: no such file")
    for chunk in read_chunks([path]):
        for number, data in enumerate(chunk.data.split(b"\n"), start=chunk.first_line):
            if data and not data.isspace():
                yield _parse(path, number, data)


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


def _parse(path: str, number: int, data: bytes) -> Line:
    line = Line(path, number, {})
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise line.error(f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise line.error(f"broken JSON: {error.msg} (column {error.colno})") from None
    except _RepeatedKeyError as error:
        raise line.error(f"the key {shown(error.args[0])} occurs twice in an object") from None
    except (ValueError, RecursionError) as error:
        raise line.error(f"broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise line.error(f"a JSON object is needed, not {shown(value)}")
    if not data.isascii() or b"\\u" in data:
        _check_text(line, value)
    return Line(path, number, value)


def _check_text(line: Line, value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise line.error(f"it holds {half}, half of a surrogate pair, which is no text") from None
    found = next((sign for sign in NONCHARACTERS if sign in text), None)
    if found is not None:
        raise line.error(f"it holds U+{ord(found):04X}, which is no character")
