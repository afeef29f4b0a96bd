"""The average of several checkpoints' weights, as one checkpoint.

Key idea: an average of weights late in a run is often better than the last (Izmailov et al. 2018). A tensor of each
checkpoint is read when the average's turn to be written comes, so memory holds one tensor a few times, never a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import storage
from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError, naming
from megalite.checkpoint.huggingface.travel import FOLDER, read_small_files, write_small_files
from megalite.checkpoint.index import check_files, read_index
from megalite.checkpoint.planner import whole_chunk
from megalite.checkpoint.rewrite import read_logical
from megalite.checkpoint.shards import write_shards
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.stored import Index, TensorInfo
from megalite.config.errors import listed
from megalite.distributed.mesh import single_process_mesh

_PREFIX = "model."
Opened = list[tuple[CheckpointDirectory, Index]]


def average(root: Path, steps: Sequence[int], target: Path) -> Path:
    """Write the average of the parameters of `root`'s checkpoints of the iterations `steps` as the first checkpoint of
    the folder `target`; the new folder.

    Sums are in fp64 and rounded once, to the last checkpoint's number format. The new one has the number,
    configuration and counters of the last iteration and no optimizer state. What was kept of a Hugging Face folder is
    copied. Raises a `CheckpointError`, and nothing of the attempt stays.
    """
    opened = [_open(root, step) for step in sorted(steps)]
    last, _ = opened[-1]
    peft = read_checkpoint_config(last).peft.peft
    if peft != "none":
        raise CheckpointError(
            f"{last.path} is of --peft {peft}: an average of adapters is not the adapter of an average"
        )
    chunks = [
        whole_chunk(key, *info, partial(_mean, key, info.dtype, opened)) for key, info in _parameters(opened).items()
    ]
    kept = root / FOLDER
    with storage.first_checkpoint(target, last.iteration, FOLDER) as folder:
        write_shards(folder, chunks, single_process_mesh().world)
        with naming(last.path):
            texts = {name: (last.path / name).read_text(encoding="utf-8") for name in storage.DOCUMENTS}
        storage.write_documents(folder, texts)
        if kept.is_dir():
            write_small_files(target / FOLDER, read_small_files(kept))
    return target / storage.directory_name(last.iteration)


def _open(root: Path, step: int) -> tuple[CheckpointDirectory, Index]:
    found = storage.find_checkpoint(root, step)
    if found is None:
        raise CheckpointError(f"--load {root} holds no checkpoint")
    index = read_index(found)
    check_files(found, index.files)
    return found, index


def _parameters(opened: Opened) -> dict[str, TensorInfo]:
    """The parameters, which all checkpoints must hold with the same shape."""
    all_of = [{key: info for key, info in index.tensors.items() if key.startswith(_PREFIX)} for _, index in opened]
    shapes = [{key: info.shape for key, info in parameters.items()} for parameters in all_of]
    for (source, _), other in zip(opened, shapes, strict=True):
        different = sorted({key for key, _ in shapes[-1].items() ^ other.items()})
        if different:
            raise CheckpointError(
                f"{source.path} and {opened[-1][0].path} hold different parameters:{listed(different)}"
            )
    return all_of[-1]


def _mean(key: str, dtype: torch.dtype, opened: Opened) -> Tensor:
    """Of one tensor. Beside the sum, one checkpoint's is in memory."""
    (first, index), *others = opened
    total = read_logical(first.path, index, key).double()
    for source, index in others:
        total += read_logical(source.path, index, key)
    return total.div_(len(opened)).to(dtype)
