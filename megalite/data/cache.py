"""Arrays that are computed once and then mapped from disk by every process that needs them.

The key idea: a file's name is a hash of all that its content depends on, so a file is either absent or right. No
process waits for another: one that finds no file builds the arrays itself and writes them under a temporary name that
becomes the real one only if no other process was first. Existing files are never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megalite.config.errors import UserError
from megalite.files.atomic import replacing


def digest(content: bytes | memoryview) -> str:
    """Hash of bytes, 32 hex digits. An array goes in as its `.data` (contiguous, one axis)."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def file_digest(path: str) -> str:
    """`digest` of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def cached_arrays(
    folder: str,
    label: str,
    key: Mapping[str, Any],
    names: tuple[str, ...],
    build: Callable[[], tuple[np.ndarray, ...]],
    notes: list[str],
) -> tuple[np.ndarray, ...]:
    """The arrays `names`, mapped from `folder` where they lie there, else built and stored.

    key: JSON-ready, all that the arrays depend on. label: readable start of the file names. Where the folder can't be
    written or holds a damaged file, the built arrays are returned from memory and `notes` gets a line.
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", label)[:100]
    stem = f"{readable}-{digest(json.dumps(key, sort_keys=True).encode())}"
    paths = [os.path.join(folder, f"{stem}-{name}.npy") for name in names]
    if all(os.path.exists(path) for path in paths):
        try:
            return tuple(np.load(path, mmap_mode="r") for path in paths)
        except (OSError, ValueError) as error:
            notes.append(f"index cache {stem} in {folder} is damaged ({error}): delete it; this run doesn't use it")
            return build()
    arrays = build()
    try:
        for path, array in zip(paths, arrays, strict=True):
            with replacing(path, keep_existing=True) as stream:
                np.save(stream, array, allow_pickle=False)
        return tuple(np.load(path, mmap_mode="r") for path in paths)
    except (UserError, OSError, ValueError) as error:
        notes.append(
            f"cannot keep the sample index in {folder} ({error}), so every start builds it again: give a writable "
            "folder with --data-cache-path"
        )
        return arrays


class MappedArrays:
    """A base of objects whose attributes are arrays: a pickle has the names of files where they are mapped whole."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), *map(mapped_state, vars(self).values()))


def _restore(kind: Callable[..., Any], *states: np.ndarray | str) -> Any:
    return kind(*map(from_mapped_state, states))


def mapped_state(array: np.ndarray) -> np.ndarray | str:
    """What to pickle for an array: the file's name where it is mapped whole from one, else the array."""
    return str(array.filename) if isinstance(array, np.memmap) and array.filename else array


def from_mapped_state(state: np.ndarray | str) -> np.ndarray:
    """The inverse of `mapped_state`."""
    return np.load(state, mmap_mode="r") if isinstance(state, str) else state
