"""Files in object storage, by their address: `s3://bucket/run` and whatever else `fsspec` knows.

Key idea: an object has its name only once all of it is there, but there are no folders, no locks, and nothing can be
renamed. So files are written under their final names, and what belongs together is complete when its last object is.
A `Remote` has what this project uses of a `Path`; what a store does otherwise is in functions that ask which it is.
It holds nothing but the address: the connections are fsspec's own, and those made before a fork aren't used after it.
Endpoint and credentials are those of the store's library, from its environment variables.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Literal

from megalite.config.errors import UserError

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)


class RemoteError(OSError, UserError):
    """What a store refused or could not be asked."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@dataclass(frozen=True)
class Remote:
    """An object, or all objects whose names go on behind a slash: a folder, which is there as long as they are.

    `path`: without the protocol. Failures are a `RemoteError`, or a FileNotFoundError or FileExistsError.
    """

    protocol: str
    path: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.protocol, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.path)[1]

    @property
    def parent(self) -> Remote:
        return Remote(self.protocol, posixpath.dirname(self.path))

    def relative_to(self, folder: Remote) -> Path:
        return Path(self.path).relative_to(folder.path)

    def resolve(self) -> Remote:
        return self

    def exists(self) -> bool:
        with self._asked() as store:
            return bool(store.exists(self.path))

    def is_file(self) -> bool:
        with self._asked() as store:
            return bool(store.isfile(self.path))

    def is_dir(self) -> bool:
        with self._asked() as store:
            return bool(store.isdir(self.path))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[Remote]:
        """What is in the folder, by one question. A FileNotFoundError where nothing is."""
        return (self / name for name in self._entries())

    def sizes(self) -> dict[str, int]:
        """The folder's files, by name, with their sizes in bytes."""
        return {name: entry["size"] for name, entry in self._entries().items() if entry["type"] == "file"}

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        return [name for name, entry in self._entries().items() if entry["type"] == "directory"]

    def _entries(self) -> dict[str, dict[str, Any]]:
        with self._asked() as store:
            entries = {entry["name"].rstrip("/"): entry for entry in store.ls(self.path, detail=True)}
        return {posixpath.basename(name): entry for name, entry in entries.items() if name != self.path}

    def glob(self, pattern: str) -> Iterator[Remote]:
        with suppress(FileNotFoundError):
            yield from (each for each in self.iterdir() if fnmatch(each.name, pattern))

    def stat(self) -> SimpleNamespace:
        """`st_size` in bytes, nothing else."""
        with self._asked() as store:
            return SimpleNamespace(st_size=int(store.size(self.path)))

    def version(self) -> str:
        """Another text once the object is another one."""
        with self._asked() as store:
            return str(store.ukey(self.path))

    def read_bytes(self) -> bytes:
        with self._asked() as store:
            return bytes(store.cat_file(self.path))

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, content: bytes, *, new: bool = False) -> None:
        """The whole object at once. `new`: a FileExistsError where there is one, however close two writers are."""
        with self._asked() as store:
            store.pipe_file(self.path, content, **({"mode": "create"} if new else {}))

    def write_text(self, content: str, encoding: str = "utf-8") -> None:
        self.write_bytes(content.encode(encoding))

    @contextmanager
    def open(self, mode: Literal["rb"] = "rb") -> Iterator[BufferedReader]:
        """The object, to be read from wherever it is asked: each `read` fetches just its bytes."""
        with self._asked() as store, store.open(self.path, mode, cache_type="none") as stream:
            yield stream

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """A new object, sent in parts; it is there once the block has ended well, and not at all where that fails."""
        with self._asked() as store:
            stream = store.open(self.path, "wb", autocommit=False)
            try:
                yield stream
                stream.close()
                stream.commit()
            except BaseException:
                with suppress(AttributeError):
                    stream.closed = True  # or else its deletion would send the rest
                stream.discard()
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing is to be done for a folder of objects."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; a store that says so raises a FileNotFoundError where there is none."""
        with suppress(*[FileNotFoundError] * missing_ok), self._asked() as store:
            store.rm_file(self.path)

    def remove_tree(self) -> None:
        """Delete the folder's objects, as far as there are any."""
        with suppress(FileNotFoundError), self._asked() as store:
            store.rm(self.path, recursive=True)

    @contextmanager
    def _asked(self) -> Iterator[Any]:
        """The store's file system. What its libraries raise becomes an OSError that names the address."""
        store = _file_system(self)
        try:
            yield store
        except (UserError, FileExistsError):
            raise
        except FileNotFoundError as error:
            named = self.path in str(error) or not str(error)
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT) if named else str(error), str(self)
            ) from error
        except OSError as error:
            raise RemoteError(error.errno or errno.EIO, error.strerror or str(error), str(self)) from error
        except Exception as error:
            if not _is_of_library(error):
                raise
            raise RemoteError(errno.EIO, str(error) or type(error).__name__, str(self)) from error


def _is_of_library(error: Exception) -> bool:
    """Whether an error comes of a store's library, not of what was done with its file."""
    return type(error).__module__.partition(".")[0] in ("botocore", "aiobotocore", "aiohttp", "google", "azure")


def _file_system(place: Remote) -> Any:
    """fsspec keeps one per process and protocol, also where the process was forked from one that has some."""
    import fsspec

    try:
        return fsspec.filesystem(place.protocol, use_listings_cache=False)
    except ImportError as error:
        needed = f"{place}: {error}" if place.protocol != "s3" else f"{place} needs s3fs: pip install 'megalite[s3]'"
        raise UserError(needed) from None
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None


Place = Path | Remote
"""Where a file or folder is: on this machine, or in object storage."""


def is_address(text: str) -> bool:
    """Whether the user means object storage, not a file of that name."""
    return _ADDRESS.fullmatch(text) is not None


def place(given: str | os.PathLike[str] | Remote) -> Place:
    """What the user or another part of the program names, an address or a path."""
    if isinstance(given, Remote):
        return given
    text = os.fspath(given)
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return Path(text)
    path = posixpath.normpath(found[2].strip("/"))
    if found[2].strip("/") == "" or path.startswith(".."):
        raise UserError(f"{text} names no place: give one like s3://BUCKET/FOLDER")
    return Path(found[2]) if found[1] == "file" else Remote(found[1], path)


def here(folder: Place) -> tuple[Path, object]:
    """A folder on this machine with the files of a small folder, and an object that has to live as long as they are
    read: with it the copies end that were made of those in storage."""
    if isinstance(folder, Path):
        return folder, None
    fetched = tempfile.TemporaryDirectory(prefix="megalite-", ignore_cleanup_errors=True)
    for name in folder.sizes():
        Path(fetched.name, name).write_bytes((folder / name).read_bytes())
    return Path(fetched.name), fetched


def file_sizes(folder: Place) -> dict[str, int]:
    """The files in a folder, by name, with their sizes in bytes."""
    if isinstance(folder, Remote):
        return folder.sizes()
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
