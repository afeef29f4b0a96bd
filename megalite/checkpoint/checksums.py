"""Checksums of the small files of a checkpoint, in a file beside them.

Key idea: small files are compared before they are believed. Data files need no sums here: each tensor in them has its
own, which its reader verifies (`shards.py`). A checkpoint of an older version has no such file and loads without it.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError, reason

CHECKSUMS = "checksums.json"
DATA_SUFFIX = ".distcp"


def checksum(content: bytes) -> str:
    """CRC-32 (of zlib and zip) of some bytes, as 8 hex digits."""
    return f"{zlib.crc32(content):08x}"


def write_checksums(folder: Path) -> None:
    """Write the sums of all in `folder` that isn't a data file. An OSError where that fails."""
    small = (path for path in folder.iterdir() if path.suffix != DATA_SUFFIX)
    files = {path.name: checksum(path.read_bytes()) for path in small}
    values = {"algorithm": "crc32", "files": dict(sorted(files.items())), "files_checksum": _of_table(files)}
    (folder / CHECKSUMS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _of_table(files: dict[str, str]) -> str:
    return checksum(json.dumps(files, sort_keys=True).encode())


def check_small_files(folder: Path) -> None:
    """Raise a `CheckpointError`, naming the file and what to do, where a file that isn't tensors was changed."""
    table = _read(folder / CHECKSUMS)
    for name, expected in table.items():
        path = folder / name
        if path.suffix == DATA_SUFFIX:  # an older version wrote these too
            continue
        try:
            found = checksum(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: {reason(error)}") from error
        if found != expected:
            raise CheckpointError(
                f"{path} is damaged or was changed: its checksum is {found}, and {CHECKSUMS} says {expected}. Copy it "
                f"again from a good copy, or load another checkpoint with --ckpt-step; if you changed it on purpose, "
                f"delete {folder / CHECKSUMS}"
            )


def _read(path: Path) -> dict[str, str]:
    """The sum of each file; none where there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = values["files"]
        if values["files_checksum"] != _of_table(files) or any(Path(name).name != name for name in files):
            raise ValueError("its own checksum is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({reason(error)}): copy it again from a good copy, or load another checkpoint "
            "with --ckpt-step"
        ) from error
    return dict(files)
