"""Megatron-LM's `torch_dist` format: tensors as torch.distributed.checkpoint stores them, the rest in `common.pt`.

Key idea: the tensors are whole in global coordinates, so ranks play no part. Those of all layers may be one tensor with
the layers as its first dimension; a layer is then a slice of it. The index is a pickle, read with an unpickler that
knows the index's own classes; what a writer kept there for itself is dropped.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import check_files
from megalite.checkpoint.megatron.joined import Joined, Slices, Source, join, one
from megalite.checkpoint.megatron.names import EXTRA, our_name
from megalite.checkpoint.megatron.pickles import Inert, read_arguments, read_pickle
from megalite.checkpoint.planner import plan_reads
from megalite.checkpoint.shards import read_shards
from megalite.checkpoint.storage import read_json
from megalite.checkpoint.stored import Index
from megalite.checkpoint.torch_dist import INDEX_FILE, IndexUnpickler, read_index
from megalite.distributed.param_spec import Box, ParamSpec
from megalite.distributed.pieces import whole

COMMON_FILE, KIND_FILE = "common.pt", "metadata.json"
_STACK = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_HALF = re.compile(r".*\.linear_fc1\.(weight|bias)_[wv]")  # gate and up, where each is a tensor of its own
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\..*|rng_state.*|rerun_state.*")
_OF_WRITERS = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.")
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"


class _Unpickler(IndexUnpickler):
    """Takes the plans of a save for an object that does nothing; older versions of torch had a class elsewhere."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_OF_WRITERS):
            return Inert
        if (module, name) == ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"):
            return BytesStorageMetadata
        if module == _OLD_PROPERTIES and name == "TensorProperties":
            return TensorProperties
        if module == _OLD_PROPERTIES and name == "MEM_FORMAT_ENCODING":
            return super().find_class("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
        return super().find_class(module, name)


def holds_torch_dist(folder: Path) -> bool:
    """Whether a folder is a checkpoint of this format. A `CheckpointError` where it is of one that isn't read."""
    kind = read_json(folder / KIND_FILE).get("sharded_backend") if (folder / KIND_FILE).exists() else None
    if kind not in (None, "torch_dist"):
        raise CheckpointError(
            f"{folder} is in the format {kind}, which is not read: Megatron-LM can save it as torch_dist"
        )
    return (folder / INDEX_FILE).exists()


def read_torch_dist(folder: Path) -> tuple[dict[str, Any], Namespace, dict[str, Joined]]:
    """What `common.pt` holds, its arguments, and all tensors of the model by our names.

    Raises a `CheckpointError` that names what is missing, damaged or of an unknown kind.
    """
    path = folder / COMMON_FILE
    if not path.exists():
        raise CheckpointError(f"{path} is missing: of the formats with {INDEX_FILE} only torch_dist can be converted")
    common = read_pickle(path)
    arguments = read_arguments(common, path)
    index = _model_index(folder)
    check_files(folder, index.files)
    return common, arguments, dict(_tensors(folder, index))


def _model_index(folder: Path) -> Index:
    """Of the model's tensors alone."""

    def wanted(key: str, entry: object) -> bool:
        return not (isinstance(entry, BytesStorageMetadata) or _NOT_MODEL.fullmatch(key) or EXTRA in key)

    return read_index(folder, _Unpickler, wanted)


def _tensors(folder: Path, index: Index) -> Iterator[tuple[str, Joined]]:
    halves: dict[str, dict[str, Source]] = {}
    for key, (shape, dtype) in index.tensors.items():
        stack = _STACK.fullmatch(key)
        if stack is None:
            layers: list[tuple[str, tuple[int, ...]]] = [(key, ())]
        else:
            layers = [(f"decoder.layers.{n}.{stack[1]}", (n,)) for n in range(shape[0])]
        for name, place in layers:
            source = Source(shape[len(place) :], dtype, partial(_read, folder, index, key, place))
            if _HALF.fullmatch(name):
                halves.setdefault(our_name(name[:-2]), {})[name[-1]] = source
            else:
                yield our_name(name), one(key, source)
    for name, pair in halves.items():
        if set(pair) != {"w", "v"}:
            raise CheckpointError(f"{folder} holds only one half of {name}: {name}_{next(iter(pair))}")
        yield name, join(name, [pair["w"], pair["v"]], 0)


def _read(folder: Path, index: Index, key: str, place: tuple[int, ...], slices: Slices) -> Tensor:
    """A part of a stored tensor, or of the layer `place` in it."""
    start = (*place, *(a.start for a in slices))
    sizes = (*(1 for _ in place), *(a.stop - a.start for a in slices))
    result = torch.empty(sizes, dtype=index.tensors[key].dtype)
    box = Box(start, (0,) * len(sizes), sizes, copies=(0,), owner=0)
    plan = plan_reads([whole(key, result, ParamSpec(index.tensors[key].shape, sizes, (box,)))], index)
    if plan.gaps:
        raise CheckpointError(f"{folder} holds only parts of {key}")
    read_shards(folder, plan.reads)
    return result.view(sizes[len(place) :])
