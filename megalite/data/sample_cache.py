"""Tokenized fine-tuning samples, made by one process and mapped by all.

The key idea: as in `cache`, a file's name is a hash of all that its content depends on: the data files, the tokenizer's
files and flags, and the versions of the libraries that read them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megalite.config.errors import UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.cache import cached_arrays
from megalite.data.jsonl import Progress

SAMPLES_VERSION = 2  # to be raised where other samples are made of the same files
_LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class SampleCache:
    """`folder`: where the arrays lie; None: in cache/ beside the first data file. `places`: files and folders that the
    tokenizer and its chat template are read from."""

    folder: str | None
    tokenizer: TokenizerConfig
    places: Sequence[str]

    def arrays(
        self,
        kind: str,
        paths: Sequence[str],
        key: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[Progress], tuple[np.ndarray, ...]],
        notes: list[str],
    ) -> tuple[np.ndarray, ...]:
        """The arrays `names` of the data files `paths`: mapped where they are there, else built under a progress bar
        and stored. `key`: what they depend on besides. `build` calls back with the bytes that it has read."""
        files = [self.content(path) for path in paths]
        whole = {"version": SAMPLES_VERSION, "kind": kind, "data": files, **self._tokenizer_key(), **key}
        folder = self.folder or os.path.join(os.path.dirname(os.path.abspath(paths[0])), "cache")

        def shown() -> tuple[np.ndarray, ...]:
            total = sum(os.path.getsize(path) for path in paths)
            with tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenize {paths[0]}", disable=None) as bar:
                return build(bar.update)

        return cached_arrays(folder, os.path.basename(paths[0]), whole, names, shown, notes)

    def content(self, path: str) -> str | None:
        """Hash of a file's content; None where there is no such file."""
        if not os.path.isfile(path):
            return None
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "blake2b").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None

    def _tokenizer_key(self) -> dict[str, Any]:
        """What ids and templates depend on. Names of folders are no part of it, so that a copy is as good."""
        given = (self.tokenizer.tokenizer_model, self.tokenizer.vocab_file, self.tokenizer.merge_file)
        found: dict[str, str | None] = {}
        for place in dict.fromkeys([*filter(None, given), *self.places]):
            path = Path(place)
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
            files = [file for file in inside if file.is_file() and file.suffix not in _WEIGHTS]
            found |= {file.name: self.content(str(file)) for file in files}
        flags = {name: value for name, value in asdict(self.tokenizer).items() if value not in given}
        return {"tokenizer": flags, "files": found, "libraries": {name: _version(name) for name in _LIBRARIES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
