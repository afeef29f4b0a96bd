"""One whole logical tensor after the other, in one process: how conversions read and write what memory can't hold.

Key idea: a tensor is read when it's asked for. A chunk to be written may stand for such a tensor, so going from files
to files holds a few tensors at a time, never the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.metadata import Index
from megalite.checkpoint.planner import Chunk, plan_reads
from megalite.checkpoint.shards import read_shards
from megalite.distributed.param_spec import Box, ParamSpec, Shape
from megalite.distributed.pieces import whole


def read_logical(checkpoint: Path, index: Index, key: str) -> Tensor:
    """A whole stored tensor on the CPU, in its own number format. A `CheckpointError` where only parts are there."""
    stored = index.metadata[key]
    shape = tuple(stored.size)
    zeros = (0,) * len(shape)
    box = Box(zeros, zeros, shape, copies=(0,), owner=0)
    tensor = torch.empty(shape, dtype=stored.properties.dtype)
    plan = plan_reads([whole(key, tensor, ParamSpec(shape, shape, (box,)))], index)
    if plan.gaps:
        raise CheckpointError(f"{checkpoint} holds only parts of {key}")
    read_shards(checkpoint, plan.reads)
    return tensor


@dataclass(frozen=True)
class _Later:
    """Stands for a tensor in a `Chunk` until it is written: what the writer needs of one, and no more."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def contiguous(self) -> Tensor:
        return self.read().contiguous()


def later(shape: Shape, dtype: torch.dtype, read: Callable[[], Tensor]) -> Chunk:
    """A chunk that is a whole logical tensor, which `read` gives when it's written."""
    return Chunk(shape, (0,) * len(shape), cast(Tensor, _Later(shape, dtype, read)))
