"""Git LFS: what a clone holds in place of a large file where the program `git lfs` isn't installed."""

from __future__ import annotations

from megalite.config.errors import UserError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
LENGTH = len(_BEGINNING)
"""Bytes that tell a pointer from a file."""


def refuse_pointer(where: str, beginning: bytes) -> None:
    """A UserError where a file that begins so is only a pointer. `where`: names it."""
    if beginning.startswith(_BEGINNING):
        raise UserError(f"{where}: a Git LFS pointer instead of the file: run `git lfs install && git lfs pull` there")
