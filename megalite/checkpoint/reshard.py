"""A checkpoint's files written again, in another number, bit for bit the same.

Key idea: loading at another layout needs none of this, since files hold logical tensors and every rank reads its part
of them. What a checkpoint of many ranks has is many files, each with pieces of tensors; here every tensor becomes one
piece, as a run of one process writes it, in as many files as wanted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError, reason
from megalite.checkpoint.huggingface.travel import FOLDER, read_small_files, write_small_files
from megalite.checkpoint.metadata import check_files, read_index
from megalite.checkpoint.shards import write_shards
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.streaming import later, read_logical
from megalite.distributed.mesh import single_process_mesh


def reshard(source: CheckpointDirectory, root: Path, *, files: int = 1) -> Path:
    """Write `source` as the first checkpoint of the folder `root`, its tensors in `files` data files; the new folder.

    Optimizer state comes along; configuration, training state and what was kept of a Hugging Face folder are copied.
    Fewer files come out where there are fewer tensors. Two tensors are read and written at a time. Raises a
    `CheckpointError`, and nothing of the attempt stays.
    """
    index = read_index(source)
    check_files(source, index.files)
    chunks = {
        key: [later(info.shape, info.dtype, partial(read_logical, source.path, index, key))]
        for key, info in index.tensors().items()
    }
    kept = source.path.parent / FOLDER
    with storage.first_checkpoint(root, source.iteration, FOLDER) as folder:
        write_shards(folder, chunks, single_process_mesh().world, files=files)
        storage.write_documents(folder, {name: _text(source.path / name) for name in storage.DOCUMENTS})
        if kept.is_dir():
            write_small_files(root / FOLDER, read_small_files(kept))
    return root / storage.directory_name(source.iteration)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error
