"""A checkpoint's tensors in one file that other programs read.

Key idea: a `.safetensors` file is a header of names, formats and places, then the bytes
(https://huggingface.co/docs/safetensors). The index of a checkpoint knows the header beforehand, so it's written first
and one tensor after the other behind it. The library's own writer, and torch's, want all tensors at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.files import FORMATS
from megalite.checkpoint.metadata import Index, check_files, read_index
from megalite.checkpoint.planner import STATE_PREFIX
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.streaming import read_logical
from megalite.config.errors import FlagError
from megalite.data.files import replacing

SAFETENSORS, PICKLES = ".safetensors", (".pt", ".pth")
_PREFIX = "model."
_ALIGNMENT = 8  # bytes that the header's length is a multiple of, as the format asks


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
            _write_safetensors(stream, source, index, keys)
        else:
            torch.save({name: read_logical(source.path, index, key) for name, key in keys.items()}, stream)
    return f"{out}: {len(keys):,} tensors, {out.stat().st_size:,} bytes"


def _write_safetensors(stream: BinaryIO, source: CheckpointDirectory, index: Index, keys: Mapping[str, str]) -> None:
    """Wide formats first, so that every tensor lies at a multiple of its own format's size."""
    stored = index.tensors()
    names = sorted(keys, key=lambda name: (-stored[keys[name]].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", "iteration": str(source.iteration)}}
    begin = 0
    for name in names:
        shape, dtype = stored[keys[name]]
        if dtype not in FORMATS:
            raise CheckpointError(f"{source.path}: {keys[name]} is of {dtype}, which has no place in {SAFETENSORS}")
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        # In one statement: a name would keep the last tensor while the next is read.
        stream.write(read_logical(source.path, index, keys[name]).reshape(-1).view(torch.uint8).numpy().data)
