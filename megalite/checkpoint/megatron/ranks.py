"""The folders `mp_rank_XX` and `mp_rank_XX_YYY` of Megatron-LM's older format (`--ckpt-format torch`).

Key idea: each holds one rank's dictionary. XX is the tensor-parallel rank, YYY the pipeline stage. Layers are numbered
from 0 on every stage and chunk, so counting them in order gives the global numbers, however unevenly they were cut.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.megatron.joined import Joined, Source, join, one
from megalite.checkpoint.megatron.names import EXTRA, LAYER, cut_dim, is_gated, our_name
from megalite.checkpoint.megatron.pickles import read_arguments, read_pickle
from megalite.config.errors import listed

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_CHUNK = re.compile(r"model(\d*)")
_ORDERED_SINCE = 2.0  # the version from which queries, keys and values are in today's order

Grid = dict[tuple[int, int], Path]
"""File by (tensor-parallel rank, stage)."""


def holds_ranks(folder: Path) -> bool:
    """Whether a folder is a checkpoint of this format."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.iterdir())


def read_ranks(folder: Path) -> tuple[dict[str, Any], Namespace, dict[str, Joined]]:
    """The first rank's dictionary, its arguments, and all tensors of the model by our names.

    Raises a `CheckpointError` that names what is missing, damaged or of an unknown kind.
    """
    grid = _grid(folder)
    first = read_pickle(grid[0, 0])
    arguments = read_arguments(first, grid[0, 0])
    _check_grid(folder, grid, arguments)
    version = first.get("checkpoint_version", 0)
    if not isinstance(version, float | int) or version < _ORDERED_SINCE:
        raise CheckpointError(
            f"{grid[0, 0]} has checkpoint_version {version}, whose queries, keys and values are in another order: load "
            "it in Megatron-LM and save it again"
        )
    chunks: dict[tuple[int, int], dict[str, list[Tensor]]] = {}  # by (chunk, stage): of all ranks
    for (_, stage), path in sorted(grid.items()):
        for chunk, tensors in _chunks(path):
            for name, tensor in tensors.items():
                chunks.setdefault((chunk, stage), {}).setdefault(name, []).append(tensor)
    swiglu = bool(getattr(arguments, "swiglu", False))
    return first, arguments, dict(_joined(folder, chunks, max(rank for rank, _ in grid) + 1, swiglu))


def _grid(folder: Path) -> Grid:
    grid: Grid = {}
    for path in sorted(folder.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            continue
        if match[3] is not None:
            raise CheckpointError(f"{path} is of a model with experts, which can't be converted")
        file = next((path / name for name in _FILES if (path / name).exists()), path / _FILES[0])
        grid[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in grid:
        raise CheckpointError(f"{folder} lacks mp_rank_00 or mp_rank_00_000")
    return grid


def _check_grid(folder: Path, grid: Grid, arguments: Namespace) -> None:
    """Raise where ranks are missing that the arguments say there were, or that lie between those that are there."""
    sizes = []
    for axis, name in enumerate(("tensor_model_parallel_size", "pipeline_model_parallel_size")):
        said = getattr(arguments, name, None)
        there = max(place[axis] for place in grid) + 1
        if isinstance(said, int) and said < there:
            raise CheckpointError(
                f"{folder} holds more ranks than --{name.replace('_', '-')} {said}, with which it was saved"
            )
        sizes.append(said if isinstance(said, int) else there)
    tp, pp = sizes
    ranks = [(rank, stage) for rank in range(tp) for stage in range(pp)]
    shown = [f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") for rank, stage in ranks]
    missing = [name for name, place in zip(shown, ranks, strict=True) if place not in grid]
    if missing:
        raise CheckpointError(
            f"{folder} was saved with --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} and lacks"
            f"{listed(missing)}"
        )


def _chunks(path: Path) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The tensors of each of a rank's chunks by our names, with the layers' numbers in the chunk."""
    content = read_pickle(path)
    keys = [(match, value) for key, value in content.items() if (match := _CHUNK.fullmatch(str(key)))]
    if not keys:
        raise CheckpointError(f"{path} holds no model")
    for match, value in keys:
        yield int(match[1] or 0), {our_name(name): tensor for name, tensor in _flat(value, "")}


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and EXTRA not in prefix:
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def _joined(
    folder: Path, chunks: Mapping[tuple[int, int], Mapping[str, list[Tensor]]], ranks: int, swiglu: bool
) -> Iterator[tuple[str, Joined]]:
    first_layer = 0
    for place in sorted(chunks):
        layers = [int(match[1]) for name in chunks[place] if (match := LAYER.fullmatch(name))]
        for name, tensors in chunks[place].items():
            if len(tensors) != ranks:
                raise CheckpointError(f"{folder}: {name} of stage {place[1]} is on {len(tensors)} of {ranks} ranks")
            match, dim = LAYER.fullmatch(name), cut_dim(name)
            full = name if match is None else f"decoder.layers.{first_layer + int(match[1])}.{match[2]}"
            sources = [Source.of(tensor) for tensor in tensors]
            if dim is None:
                yield full, one(full, sources[0])
            else:
                yield full, join(full, sources, dim, gated=is_gated(name, swiglu))
        first_layer += max(layers, default=-1) + 1
