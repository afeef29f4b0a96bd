"""Arrays that are computed once and then mapped from disk by every process that needs them.

The key idea: a file's name is a hash of all that its content depends on, so a file is either absent or right. For
samples of fine-tuning that is the data files, the tokenizer as it was loaded, whichever files that took, and the
versions of the libraries that read them. No process waits for another: one that finds no file builds the arrays itself
and writes them under a temporary name that becomes the real one only if no other process was first. Existing files are
never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self, TypeVar

import numpy as np
from tqdm import tqdm

from megalite.config.errors import UserError
from megalite.data.jsonl import Progress
from megalite.data.tokenizer_base import Tokenizer
from megalite.files.atomic import replacing

SAMPLES_VERSION = 2  # to be raised where other samples are made of the same files
_LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2")
T = TypeVar("T")
S = TypeVar("S", bound="MappedArrays")


def digest(content: bytes | memoryview) -> str:
    """Hash of bytes, 32 hex digits. An array goes in as its `.data` (contiguous, one axis)."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def file_digest(path: str) -> str:
    """`digest` of a file's content. A UserError where it can't be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class MappedArrays:
    """A base of objects whose fields are arrays: a pickle has the names of files where they are mapped whole."""

    @classmethod
    def cached(
        cls, folder: str, label: str, key: Mapping[str, Any], build: Callable[[], Self], notes: list[str]
    ) -> Self:
        """The object, its arrays mapped from `folder` where they lie there, else built and stored.

        key: JSON-ready, all that the arrays depend on. label: readable start of the file names. Where the folder can't
        be written or holds a damaged file, the built object is returned from memory and `notes` gets a line.
        """
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", label)[:100]
        stem = f"{readable}-{digest(json.dumps(key, sort_keys=True).encode())}"
        paths = [os.path.join(folder, f"{stem}-{each.name}.npy") for each in fields(cls)]
        if all(os.path.exists(path) for path in paths):
            try:
                return _restore(cls, *paths)
            except (OSError, EOFError, ValueError) as error:
                notes.append(f"index cache {stem} in {folder} is damaged ({error}): delete it; this run doesn't use it")
                return build()
        built = build()
        try:
            for path, array in zip(paths, vars(built).values(), strict=True):
                with replacing(path, keep_existing=True) as stream:
                    np.save(stream, array, allow_pickle=False)
            return _restore(cls, *paths)
        except (UserError, OSError, ValueError) as error:
            notes.append(
                f"cannot keep the sample index in {folder} ({error}), so every start builds it again: give a writable "
                "folder with --data-cache-path"
            )
            return built

    def __reduce__(self) -> tuple[object, ...]:
        # The file's name where an array is mapped whole from one, else the array.
        states = (
            str(each.filename) if isinstance(each, np.memmap) and each.filename else each
            for each in vars(self).values()
        )
        return _restore, (type(self), *states)


def _restore(kind: type[T], *states: np.ndarray | str) -> T:
    return kind(*(np.load(state, mmap_mode="r") if isinstance(state, str) else state for state in states))


@dataclass(frozen=True)
class SampleCache:
    """Where tokenized samples of fine-tuning are kept. `folder`: None: in cache/ beside the first data file."""

    folder: str | None

    def samples(
        self,
        kind: type[S],
        tokenizer: Tokenizer,
        paths: Sequence[str],
        key: Mapping[str, Any],
        build: Callable[[Progress], S],
        notes: list[str],
    ) -> S:
        """The samples of the data files `paths`: mapped where they are there, else built under a progress bar and
        stored. `key`: what they depend on besides. `build` calls back with the bytes that it has read."""
        libraries = {name: _version(name) for name in _LIBRARIES}
        made_by = {"version": SAMPLES_VERSION, "tokenizer": tokenizer.fingerprint(), "libraries": libraries}
        whole = {**made_by, "data": [file_digest(path) for path in paths], **key}
        folder = self.folder or os.path.join(os.path.dirname(os.path.abspath(paths[0])), "cache")

        def build_and_show() -> S:
            total = sum(os.path.getsize(path) for path in paths)
            with tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenize {paths[0]}", disable=None) as bar:
                return build(bar.update)

        return kind.cached(folder, os.path.basename(paths[0]), whole, build_and_show, notes)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
