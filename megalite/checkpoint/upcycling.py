"""Experts that start from a dense model's MLP (Komatsuzaki et al. 2022, Sparse Upcycling).

Key idea: what a rank holds of a layer's experts is, expert by expert, a piece of the dense MLP's weight. So with these
pieces in place of its own any reader of checkpoints fills it, at any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.distributed.param_spec import ParamSpec
from megalite.distributed.pieces import Piece

_EXPERTS, _ROUTER, _MLP = ".mlp.experts.", ".mlp.router.", ".mlp."


def of_dense(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """`pieces` of a model with experts, as a dense checkpoint fills them: each expert of a weight [experts, ...] is
    one of the MLP's [...]. Routers, which it lacks, are left out."""
    for piece in pieces:
        if _EXPERTS in piece.name:
            yield from _each_expert(piece)
        elif not is_of_router(piece.name):
            yield piece


def is_of_router(name: str) -> bool:
    """Whether a dense model lacks this parameter of a model with experts."""
    return _ROUTER in name


def _each_expert(piece: Piece) -> Iterator[Piece]:
    name, local = piece.name.replace(_EXPERTS, _MLP), piece.spec.local_shape
    size, stop = prod(local[1:]), piece.start + piece.flat.numel()
    for expert in range(local[0]):
        first = expert * size
        low, high = max(first, piece.start), min(first + size, stop)
        if low < high:
            flat = piece.flat[low - piece.start : high - piece.start]
            yield piece._replace(name=name, flat=flat, start=low - first, spec=_of_one(piece.spec, expert))


def _of_one(spec: ParamSpec, expert: int) -> ParamSpec:
    """The place of one local expert's part of a weight [experts, ...]."""
    boxes = [box for box in spec.boxes if 0 <= expert - box.local_start[0] < box.shape[0]]
    inner = tuple(
        replace(box, global_start=box.global_start[1:], local_start=box.local_start[1:], shape=box.shape[1:])
        for box in boxes
    )
    return replace(spec, shape=spec.shape[1:], local_shape=spec.local_shape[1:], boxes=inner)


def starts_from_dense(directory: CheckpointDirectory, *, weights_only: bool) -> bool:
    """Whether a run with `--moe-use-upcycling` makes its experts of this checkpoint: not where it goes on with its own.
    A `CheckpointError` where the two can't be meant together."""
    dense = read_checkpoint_config(directory.path).model.num_experts is None
    if dense and not weights_only:
        raise CheckpointError(
            f"{directory.path} is of a dense model: --moe-use-upcycling takes its weights alone. Add --finetune, or "
            "give it as --pretrained-checkpoint and let --load name the folder of --save"
        )
    if weights_only and not dense:
        raise CheckpointError(
            f"{directory.path} has experts already: leave out --moe-use-upcycling, which needs a dense model"
        )
    return dense
