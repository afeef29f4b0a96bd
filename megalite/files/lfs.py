"""Git LFS: what a clone holds in place of a large file where the program `git lfs` isn't installed."""

from __future__ import annotations

_BEGINNING = b"version https://git-lfs.github.com/spec/"
LENGTH = len(_BEGINNING)
"""Bytes that tell a pointer from a file."""

WRONG = "a Git LFS pointer instead of the file: run `git lfs install && git lfs pull` there"
"""What is wrong with a pointer, for a message."""


def is_pointer(beginning: bytes) -> bool:
    """Whether a file that begins so only says where the file is."""
    return beginning.startswith(_BEGINNING)
