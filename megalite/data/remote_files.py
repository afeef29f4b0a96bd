"""Token files in object storage, by a prefix like `s3://BUCKET/corpus`.

Key idea: samples are read from all over a file, a few hundred bytes at a time. So a pair is copied to this machine
once, and all its processes map the copy. Its folder is named by what the store says of the objects: a pair that has
changed there is copied again, beside the old one.
"""

from __future__ import annotations

from pathlib import Path

from megalite.config.errors import UserError
from megalite.data.cache import digest
from megalite.data.indexed_dataset import bin_path, idx_path
from megalite.files.atomic import replacing
from megalite.files.remote import Remote, is_address, place

_PART = 64 << 20  # bytes in memory while a file is copied


def local_prefix(prefix: str, cache: str | None) -> str:
    """Where a pair of token files is on this machine; one that is in storage is copied into the folder `cache` if it
    isn't there. A UserError where it can't be."""
    objects = _objects(prefix)
    if not objects:
        return prefix
    assert cache is not None, "remote_problem asks for it"
    try:
        version = digest("".join(each.version() for each in objects).encode())
        folder = Path(cache, f"{objects[0].name.removesuffix('.bin')}-{version}")
        for each in objects:  # the index last: a pair without one is incomplete
            if not (folder / each.name).exists():
                _copy(each, folder / each.name)
    except OSError as error:
        raise UserError(f"{prefix}: {error.strerror or error}") from None
    return str(folder / objects[0].name.removesuffix(".bin"))


def _copy(source: Remote, target: Path) -> None:
    size, done = source.stat().st_size, 0
    with source.open() as stream, replacing(target, keep_existing=True) as copy:
        while part := stream.read(min(_PART, size - done)):
            copy.write(part)
            done += len(part)
    if done != size:
        raise UserError(f"{source} became shorter while it was read")


def remote_problem(prefix: str, cache: str | None) -> str | None:
    """What is wrong with a pair in storage, or with the place for its copy, before it is copied."""
    if cache is None:
        return f"{prefix} is in object storage: name a folder on this machine for its copy with --data-cache-path"
    for each in _objects(prefix):
        try:
            each.stat()
        except FileNotFoundError:
            return f"no file {each}; a data path is the prefix of a .bin and .idx pair"
        except (OSError, UserError) as error:
            return str(error)
    return None


def _objects(prefix: str) -> list[Remote]:
    """The pair's objects; none for a prefix on this machine."""
    files = [place(path) for path in (bin_path(prefix), idx_path(prefix))] if is_address(prefix) else []
    return [file for file in files if isinstance(file, Remote)]
