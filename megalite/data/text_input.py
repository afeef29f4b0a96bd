"""Reads a corpus: JSON lines or plain text, compressed or not, as a stream of documents.

The key idea: reading and parsing are apart. `read_chunks` cuts files into chunks of whole lines without looking at
them, which is cheap, and `parse_chunk` finds the documents in one chunk, in whichever process has time. A chunk knows
its file and first line, so an error in a document names file and line.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import IO, Any, NamedTuple

from megalite.config.errors import FlagError, UserError

TEXT_DOCUMENTS = ("file", "paragraph", "line")  # what is one document of a plain text file
COMPRESSED = (".gz", ".zst")
_UTF8_MARK = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True)
class TextChunk:
    """Whole lines of one file. `kind`: jsonl, or what one document of a plain text file is (TEXT_DOCUMENTS)."""

    path: str
    kind: str
    first_line: int
    data: bytes
    progress: int  # bytes of the file, as it lies on disk, read since the chunk before


class Document(NamedTuple):
    """One text per key asked for. Any of them may be empty or blank."""

    line: int
    texts: tuple[str, ...]


class Problem(NamedTuple):
    """A document that can't be read, and why."""

    line: int
    message: str


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Files that names and glob patterns (`**` included) stand for: in the order given, those of a pattern sorted.

    Raises UserError for a pattern that matches no file, a folder, and a file that is named twice.
    """
    files: list[str] = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            raise UserError(
                f"--input {pattern} is a folder; give the files in it, for example '{PurePath(pattern, '*.jsonl')}'"
            )
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            raise UserError(f"--input {pattern}: no such file")
        files += matches
    refuse_repeats(files)
    return files


def refuse_repeats(paths: Iterable[str]) -> None:
    """Raise UserError where two of the paths of `--input` are one file."""
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UserError(f"--input names {path} twice")
        seen.add(real)


def suffix_of(path: str) -> str:
    """The end of a file's name that says its format, in small letters, without that of its compression."""
    name = PurePath(path)
    return (PurePath(name.stem) if name.suffix.lower() in COMPRESSED else name).suffix.lower()


def kind_of(path: str, text_documents: str = "file") -> str:
    """How a file is read, by its name: `.txt` is plain text, all else JSON lines; `.gz` and `.zst` may follow."""
    suffix = suffix_of(path)
    if suffix in (".parquet", ".arrow", ".csv", ".tsv", ".xz", ".bz2", ".zip", ".tar"):
        raise UserError(
            f"--input {path}: {suffix} is not supported; give JSON lines or plain text (.jsonl, .txt, + .gz, .zst)"
        )
    return text_documents if suffix == ".txt" else "jsonl"


def check_keys(paths: Sequence[str], keys: Sequence[str]) -> None:
    """Raises FlagError for keys that contradict each other or the files."""
    if not keys or len(set(keys)) != len(keys):
        raise FlagError(f"--json-keys {' '.join(keys)}: give one or more different keys")
    plain = next((path for path in paths if kind_of(path) != "jsonl"), None)
    if plain is not None and len(keys) > 1:
        raise FlagError(f"--json-keys {' '.join(keys)}: the plain text file {plain} has only one text, so give one key")


def read_chunks(paths: Iterable[str], text_documents: str = "file", chunk_bytes: int = 1 << 20) -> Iterator[TextChunk]:
    """Chunks of about `chunk_bytes` (more where one document is longer), in order; at most two in memory.

    Raises UserError for a file that can't be opened, read or decompressed to its end.
    """
    for path in paths:
        try:
            yield from _chunks_of(path, kind_of(path, text_documents), chunk_bytes)
        except EOFError:
            raise UserError(f"{path}: the compressed file ends too early") from None
        except zlib.error as error:
            raise UserError(f"{path}: broken compression ({error})") from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None


def _chunks_of(path: str, kind: str, chunk_bytes: int) -> Iterator[TextChunk]:
    buffer = bytearray()
    line, reported, searched = 1, 0, 0
    with open(path, "rb") as file:
        # The empty block at the end ends the last document.
        for block in itertools.chain(_blocks(file, path, chunk_bytes), [b""]):
            buffer += block
            if block and len(buffer) < chunk_bytes:
                continue
            cut = _last_boundary(buffer, searched, kind) if block else len(buffer)
            if cut or (kind == "file" and not block):
                data = bytes(buffer[:cut])
                del buffer[:cut]
                yield TextChunk(
                    path, kind, line, _without_mark(data, path) if line == 1 else data, file.tell() - reported
                )
                line += data.count(b"\n")
                reported = file.tell()
            searched = len(buffer)


def _last_boundary(buffer: bytearray, searched: int, kind: str) -> int:
    """Where the last complete document in the buffer ends, 0 for none; the first `searched` bytes hold none."""
    if kind == "file":
        return 0
    if kind != "paragraph":
        return buffer.rfind(b"\n", searched) + 1
    start = max(buffer.rfind(b"\n", 0, searched), 0)
    last = None
    for last in _BLANK_LINE.finditer(buffer, start):  # noqa: B007
        pass
    return last.end() if last else 0


def _without_mark(data: bytes, path: str) -> bytes:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}: this is UTF-16; convert it to UTF-8")
    return data.removeprefix(_UTF8_MARK)


def _blocks(file: IO[bytes], path: str, size: int) -> Iterator[bytes]:
    """A file's content, decompressed, in blocks of about `size`."""
    if path.lower().endswith(".zst"):
        yield from _zst_blocks(file, size)
        return
    stream: Any = gzip.GzipFile(fileobj=file) if path.lower().endswith(".gz") else file
    while block := stream.read(size):
        yield block


def _zst_blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    import zstandard

    frame = None  # not the library's stream reader: it takes a truncated frame for the end
    try:
        while block := file.read(min(size, 1 << 18)):
            while block:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(block)
                block = b""
                if frame.eof:  # several frames may follow one another, as pzstd and cat write them
                    block, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise OSError(f"broken compression ({error})") from None
    if frame is not None:
        raise EOFError


def parse_chunk(chunk: TextChunk, keys: Sequence[str]) -> Iterator[Document | Problem]:
    """The documents of a chunk in order. Blank lines between documents are nothing; texts are valid Unicode.

    Line ends of plain text become newlines; a JSON string is taken as it is.
    """
    if chunk.kind == "jsonl":
        for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.first_line):
            if line and not line.isspace():
                yield _parse_json_line(number, line, keys)
        return
    try:
        text = chunk.data.decode("utf-8")
    except UnicodeDecodeError as error:
        yield Problem(chunk.first_line + chunk.data.count(b"\n", 0, error.start), _not_utf8(error, chunk.data))
        return
    text = text.replace("\r\n", "\n")
    if chunk.kind == "file":
        yield Document(chunk.first_line, (text,))
        return
    rows = enumerate(text.split("\n"), start=chunk.first_line)
    for blank, group in itertools.groupby(rows, lambda row: not row[1].strip()):
        if not blank:
            numbers, lines = zip(*group, strict=True)
            if chunk.kind == "paragraph":
                yield Document(numbers[0], ("\n".join(lines),))
            else:
                yield from (Document(number, (line,)) for number, line in zip(numbers, lines, strict=True))


def _parse_json_line(number: int, line: bytes, keys: Sequence[str]) -> Document | Problem:
    try:
        value = parse_json(line)
        if not isinstance(value, dict):
            raise ValueError(f"a JSON object with the key {keys[0]!r} is needed, not {excerpt(value)}")
        return Document(number, tuple(_text_of(value, key) for key in keys))
    except ValueError as error:
        return Problem(number, str(error))


def _text_of(value: dict[str, Any], key: str) -> str:
    if key not in value:
        there = ", ".join(repr(k) for k in list(value)[:8]) or "none"
        raise ValueError(f"no key {key!r} (--json-keys); the line's keys: {there}")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is {excerpt(text)}, not a string")
    check_unicode(text, f"the value of {key!r}")
    return text


def parse_json(line: bytes, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text. `make_object`: as `json.loads` takes it as `object_pairs_hook`. Raises ValueError that
    says what is wrong."""
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error, line)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"broken JSON: {error}") from None


def check_unicode(text: str, what: str) -> None:
    """Raise ValueError where a text, called `what`, holds half of a surrogate pair, as JSON's escapes can write it."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{what} holds {half}, half of a surrogate pair, which is not valid text") from None


def excerpt(value: object) -> str:
    """The beginning of a JSON value, for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _not_utf8(error: UnicodeDecodeError, data: bytes) -> str:
    column = error.start - data.rfind(b"\n", 0, error.start)
    return f"not UTF-8: byte 0x{data[error.start]:02x} at byte {column} of the line"


def read_documents(paths: Sequence[str], keys: Sequence[str], text_documents: str = "file") -> Iterator[Document]:
    """All documents, one process. Raises UserError with file and line at the first that can't be read."""
    for chunk in read_chunks(paths, text_documents):
        for item in parse_chunk(chunk, keys):
            if isinstance(item, Problem):
                raise UserError(f"{chunk.path}:{item.line}: {item.message}")
            yield item
