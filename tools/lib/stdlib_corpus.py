"""The embedded default corpus: the Python standard library's own source, read from the running interpreter.

The key idea: real text (code, comments, docstrings, documentation) that lies on every machine, so that a first run
needs no download. Files are held out whole, chosen by a hash of their path: the same split on every machine, and
adding a file moves no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megalite.config.errors import UserError
from megalite.files.atomic import replacing

# Installed packages, caches, and tests, which repeat the code that they test.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib-dynload",
    "__phello__",
}
GENERATED = ("generated from", "automatically generated", "auto-generated", "this file is generated")
TABLES = {"html/entities.py", "encodings/aliases.py", "locale.py"}
VALID_SHARE = 20  # one file in so many is held out
LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class CorpusSummary:
    """Paths written, with documents and bytes of text in each."""

    train: str
    valid: str
    train_documents: int
    valid_documents: int
    train_bytes: int
    valid_bytes: int


def stdlib_folder() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def build_corpus(output: str, source: Path | None = None, least_bytes: int = LEAST_BYTES) -> CorpusSummary:
    """Writes `train.jsonl` and `valid.jsonl` into the folder `output`, lines `{"text": ..., "path": ...}` by path.

    source: a folder of `.py` files; None: the standard library. Raises UserError where it holds too little text.
    """
    folder = source or stdlib_folder()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a folder of .py files with --source")
    documents = list(corpus_files(folder))
    held_out = [document for document in documents if is_held_out(document[0])]
    kept = [document for document in documents if not is_held_out(document[0])]
    sizes = [sum(len(text.encode()) for _, text in part) for part in (kept, held_out)]
    if sum(sizes) < least_bytes or not held_out or not kept:
        raise UserError(
            f"{folder} holds {len(documents)} usable .py files with {sum(sizes):,} bytes, at least {least_bytes:,} are "
            "needed (is the standard library zipped or stripped here?); give another folder with --source"
        )
    paths = [os.path.join(output, name) for name in ("train.jsonl", "valid.jsonl")]
    with replacing(paths[0]) as train, replacing(paths[1]) as valid:
        for stream, part in ((train, kept), (valid, held_out)):
            for path, text in part:
                stream.write(json.dumps({"text": text, "path": path}, ensure_ascii=False).encode() + b"\n")
    return CorpusSummary(paths[0], paths[1], len(kept), len(held_out), sizes[0], sizes[1])


def corpus_files(folder: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the `.py` files worth learning from, in the order of their paths.

    Left out: tests, installed packages, generated tables, files that aren't UTF-8, empty ones and exact copies.
    """
    seen: set[bytes] = set()
    for path in sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py")):
        if SKIPPED_FOLDERS & set(PurePosixPath(path).parts[:-1]):
            continue
        try:
            text = (folder / path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        mark = hashlib.sha256(text.encode()).digest()
        if text.strip() and mark not in seen and not _is_table(path, text):
            seen.add(mark)
            yield path, text


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path goes to `valid.jsonl`."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % VALID_SHARE == 0


def _is_table(path: str, text: str) -> bool:
    """Generated character maps and lists of names: long, repetitive, and no language."""
    head = text[:600].lower()
    character_map = path.startswith("encodings/") and "decoding_map" in text
    return (
        path in TABLES or path.startswith("_sysconfigdata") or character_map or any(mark in head for mark in GENERATED)
    )
