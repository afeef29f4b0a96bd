"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from megalite.config.errors import UserError


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` at the end of the block, and is removed where the block fails.

    Folders on the way are made. Raises UserError, naming the file, where it can't be written.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
