"""Tokenized fine-tuning samples, made by one process and mapped by all.

The key idea: as in `cache`, a file's name is a hash of all that its content depends on: the data files, the tokenizer
as it was loaded, whichever files that took, and the versions of the libraries that read them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from tqdm import tqdm

from megalite.config.errors import UserError
from megalite.data.cache import file_digest
from megalite.data.jsonl import Progress
from megalite.data.packing import TokenSequences
from megalite.data.tokenizer_base import Tokenizer

SAMPLES_VERSION = 2  # to be raised where other samples are made of the same files
_LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2")
S = TypeVar("S", bound=TokenSequences)


@dataclass(frozen=True)
class SampleCache:
    """`folder`: where the arrays lie; None: in cache/ beside the first data file."""

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
        whole = {**made_by, "data": [_content(path) for path in paths], **key}
        folder = self.folder or os.path.join(os.path.dirname(os.path.abspath(paths[0])), "cache")

        def build_and_show() -> S:
            total = sum(os.path.getsize(path) for path in paths)
            with tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenize {paths[0]}", disable=None) as bar:
                return build(bar.update)

        return kind.cached(folder, os.path.basename(paths[0]), whole, build_and_show, notes)


def _content(path: str) -> str:
    """Hash of a file's content."""
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
