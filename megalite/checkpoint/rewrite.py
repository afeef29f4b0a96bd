"""A checkpoint's tensors written again, in one process: as another checkpoint, or as one file for other programs.

Key idea: the index knows every shape beforehand, so a tensor is read only when its turn to be written comes. Memory
holds a few tensors at a time, never the model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError, naming
from megalite.checkpoint.huggingface.travel import FOLDER, read_small_files, write_small_files
from megalite.checkpoint.index import check_files, read_index
from megalite.checkpoint.planner import STATE_PREFIX, plan_reads, whole_chunk
from megalite.checkpoint.shards import read_shards, write_shards
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.stored import Index
from megalite.checkpoint.tensor_file import Entry, write_safetensors
from megalite.config.errors import FlagError
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import Box, ParamSpec
from megalite.distributed.pieces import whole
from megalite.files.atomic import replacing
from megalite.files.remote import Place

SAFETENSORS, PICKLES = ".safetensors", (".pt", ".pth")
_PREFIX = "model."


def read_logical(checkpoint: Place, index: Index, key: str) -> Tensor:
    """A whole stored tensor on the CPU, in its own number format. A `CheckpointError` where only parts are there."""
    shape, dtype = index.tensors[key]
    zeros = (0,) * len(shape)
    box = Box(zeros, zeros, shape, copies=(0,), owner=0)
    tensor = torch.empty(shape, dtype=dtype)
    plan = plan_reads([whole(key, tensor, ParamSpec(shape, shape, (box,)))], index)
    if plan.gaps:
        raise CheckpointError(f"{checkpoint} holds only parts of {key}")
    read_shards(checkpoint, plan.reads)
    return tensor


def reshard(source: CheckpointDirectory, root: Place, *, files: int = 1) -> Place:
    """Write `source` as the first checkpoint of the folder `root`, its tensors in `files` data files; the new folder.

    Loading at another layout needs none of this: it turns the many pieces of tensors that many ranks wrote into whole
    tensors in few files, bit for bit the same. Optimizer state comes along; configuration, training state and what was
    kept of a Hugging Face folder are copied. Fewer files come out where there are fewer tensors. Raises a
    `CheckpointError`, and nothing of the attempt stays.
    """
    index = read_index(source)
    check_files(source, index.files)
    chunks = [
        whole_chunk(key, *info, partial(read_logical, source.path, index, key)) for key, info in index.tensors.items()
    ]
    kept = source.path.parent / FOLDER
    with storage.first_checkpoint(root, source.iteration, FOLDER) as folder:
        write_shards(folder, chunks, single_process_mesh().world, files=files)
        with naming(source.path):
            texts = {name: (source.path / name).read_text(encoding="utf-8") for name in storage.DOCUMENTS}
        storage.write_documents(folder, texts)
        write_small_files(root / FOLDER, read_small_files(kept))
    return root / storage.directory_name(source.iteration)


def write_single_file(source: CheckpointDirectory, out: Path, *, optimizer: bool = False) -> str:
    """Write the whole logical parameters by their global names into `out`, as its suffix says; a line for the user.

    `optimizer`: its state too, as `optimizer.KIND.NAME`. Number formats and bits are the checkpoint's. An existing file
    is replaced when the new one is whole. Memory holds one tensor at a time (`.safetensors`) or all (`.pt`: torch's own
    format wants them at once). Raises a UserError that names the file.
    """
    if out.suffix not in (SAFETENSORS, *PICKLES):
        raise FlagError(f"--out {out}: the name must end in {', '.join((SAFETENSORS, *PICKLES))}")
    index = read_index(source)
    check_files(source, index.files)
    entries = [
        Entry(key.removeprefix(_PREFIX), *info, partial(read_logical, source.path, index, key))
        for key, info in sorted(index.tensors.items())
        if key.startswith(_PREFIX) or (optimizer and key.startswith(STATE_PREFIX))
    ]
    with replacing(out) as stream:
        if out.suffix == SAFETENSORS:
            write_safetensors(stream, entries, {"format": "pt", "iteration": str(source.iteration)})
        else:
            torch.save({entry.name: entry.read() for entry in entries}, stream)
    return f"{out}: {len(entries):,} tensors, {out.stat().st_size:,} bytes"
