"""A checkpoint's tensors in one file that other programs read.

Key idea: the index of a checkpoint knows every shape beforehand, so the file's header is written first and one tensor
after the other behind it. Torch's own format wants all tensors at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from megalite.checkpoint.huggingface.files import Entry, write_safetensors
from megalite.checkpoint.metadata import Index, check_files, read_index
from megalite.checkpoint.planner import STATE_PREFIX
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.streaming import read_logical
from megalite.config.errors import FlagError
from megalite.files.atomic import replacing

SAFETENSORS, PICKLES = ".safetensors", (".pt", ".pth")
_PREFIX = "model."


def check_suffix(out: Path) -> None:
    """A FlagError where the file's name doesn't say which format it is."""
    if out.suffix not in (SAFETENSORS, *PICKLES):
        raise FlagError(f"--out {out}: the name must end in {', '.join((SAFETENSORS, *PICKLES))}")


def write_single_file(source: CheckpointDirectory, out: Path, *, optimizer: bool = False) -> str:
    """Write the whole logical parameters by their global names into `out`, as its suffix says; a line for the user.

    `optimizer`: its state too, as `optimizer.KIND.NAME`. Number formats and bits are the checkpoint's. An existing file
    is replaced when the new one is whole. Memory holds one tensor at a time (`.safetensors`) or all (`.pt`). Raises a
    UserError that names the file.
    """
    check_suffix(out)
    index = read_index(source)
    check_files(source, index.files)
    keys = {
        key.removeprefix(_PREFIX): key
        for key in index.metadata
        if key.startswith(_PREFIX) or (optimizer and key.startswith(STATE_PREFIX))
    }
    with replacing(str(out)) as stream:
        if out.suffix == SAFETENSORS:
            metadata = {"format": "pt", "iteration": str(source.iteration)}
            write_safetensors(stream, list(_entries(source, index, keys)), metadata)
        else:
            torch.save({name: read_logical(source.path, index, key) for name, key in keys.items()}, stream)
    return f"{out}: {len(keys):,} tensors, {out.stat().st_size:,} bytes"


def _entries(source: CheckpointDirectory, index: Index, keys: Mapping[str, str]) -> Iterator[Entry]:
    stored = index.tensors()
    for name, key in sorted(keys.items()):
        shape, dtype = stored[key]
        yield Entry(name, shape, dtype, partial(read_logical, source.path, index, key))
