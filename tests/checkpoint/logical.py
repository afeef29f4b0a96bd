"""A small model as data: every kind of cut that a spec knows, with logical values to check any layout against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.planner import Chunk, owned_chunks
from megalite.checkpoint.shards import write_shards
from megalite.checkpoint.storage import CheckpointDirectory, Retention, find_checkpoint
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import (
    Box,
    ParamSpec,
    Place,
    Shape,
    cut,
    grouped_qkv,
    replicated,
    vocabulary_rows,
)
from tests.helpers import NamedTensor, pieces_of, save_checkpoint

LAYERS = 4
HIDDEN = 6
KEEP_ALL = Retention()


def _spec(shape: Shape, local_shape: Shape, boxes: tuple[Box, ...]) -> ParamSpec:
    return ParamSpec(shape, local_shape, boxes)


def _vocabulary(rows: int, padded_rows: int, place: Place) -> ParamSpec:
    shape = (rows, HIDDEN)
    return _spec(shape, (padded_rows // place.tp, HIDDEN), vocabulary_rows(shape, padded_rows, place))


def _cut(shape: Shape, dim: int, place: Place) -> ParamSpec:
    local = tuple(n // place.tp if i == dim else n for i, n in enumerate(shape))
    return _spec(shape, local, cut(shape, dim, place))


def _qkv(place: Place) -> ParamSpec:
    """2 groups of 4 queries, head dimension 3."""
    tail = (3, HIDDEN)
    local = (2 // place.tp, 6, *tail) if place.tp <= 2 else (1, 8 // place.tp + 2, *tail)
    return _spec((2, 6, *tail), local, grouped_qkv(2, 4, tail, place))


def specs(layout: Layout, rank: int) -> dict[str, ParamSpec]:
    """Every parameter of a rank: layers by their global number, the embedding tied between first and last stage."""
    stage = layout.coordinates(rank)["pp"]
    place = Place(layout, rank)
    result: dict[str, ParamSpec] = {}
    if stage in (0, layout.pp - 1):
        ends = tuple(sorted({0, layout.pp - 1}))
        result["embedding.weight"] = _vocabulary(131, 136, Place(layout, rank, ends))
    if stage == 0:
        # Of 4 ranks two hold nothing but padding.
        result["small_table.weight"] = _vocabulary(5, 16, place)
    each = LAYERS // layout.pp
    for n in range(stage * each, (stage + 1) * each):
        result[f"layers.{n}.qkv.weight"] = _qkv(place)
        result[f"layers.{n}.fc1.weight"] = _cut((2, 8, HIDDEN), 1, place)
        result[f"layers.{n}.fc2.weight"] = _cut((HIDDEN, 8), 1, place)
        result[f"layers.{n}.norm.weight"] = _spec((HIDDEN,), (HIDDEN,), replicated((HIDDEN,), place, partial=True))
    return result


def truth(key: str, shape: Shape, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """The logical tensor: a function of the key alone, in which every element is different (but for rounding)."""
    generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(key)) % 2**31 + salt)
    return torch.randn(shape, generator=generator).to(dtype)


def dtype_of(key: str) -> torch.dtype:
    """Parameters are bfloat16, the optimizer's state float32."""
    return torch.bfloat16 if key.startswith("model.") else torch.float32


def keyed_specs(layout: Layout, rank: int) -> dict[str, ParamSpec]:
    """What a checkpoint holds of a rank."""
    named = specs(layout, rank)
    kinds = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.main.")
    return {kind + name: spec for kind in kinds for name, spec in named.items()}


def logical_shapes() -> dict[str, Shape]:
    """Key and logical shape of all."""
    return {key: spec.shape for key, spec in keyed_specs(Layout(), 0).items()}


def filled(layout: Layout, rank: int, salt: int = 0) -> Iterator[NamedTensor]:
    """This rank's tensors with their true values; padding is NaN, so that a checkpoint that holds any is found out."""
    for key, spec in keyed_specs(layout, rank).items():
        local = torch.full(spec.local_shape, float("nan"), dtype=dtype_of(key))
        whole = truth(key, spec.shape, dtype_of(key), salt)
        for box in spec.boxes:
            local[box.local_slices] = whole[box.global_slices]
        yield key, local, spec


def empty(layout: Layout, rank: int, dtype: torch.dtype | None = None) -> list[NamedTensor]:
    """This rank's tensors, all 7: a number that no truth holds."""
    return [
        (key, torch.full(spec.local_shape, 7.0, dtype=dtype or dtype_of(key)), spec)
        for key, spec in keyed_specs(layout, rank).items()
    ]


def assert_true(tensors: list[NamedTensor], salt: int = 0) -> None:
    """Boxes hold the truth bit for bit, padding still is 7."""
    for key, local, spec in tensors:
        whole = truth(key, spec.shape, dtype_of(key), salt).to(local.dtype)
        expected = torch.full_like(local, 7.0)
        for box in spec.boxes:
            expected[box.local_slices] = whole[box.global_slices]
        assert torch.equal(local, expected), key


def save(
    mesh: Mesh,
    root: Path,
    iteration: int,
    tensors: list[NamedTensor] | None = None,
    salt: int = 0,
    *,
    run: RunConfig | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    """Save the truth (or `tensors`) as this mesh's rank."""
    return save_checkpoint(
        root,
        iteration,
        mesh=mesh,
        pieces=pieces_of(filled(mesh.layout, mesh.rank, salt) if tensors is None else tensors),
        config=run or config(),
        training_state=state or {"iteration": iteration, "salt": salt},
        retain=KEEP_ALL,
    )


def config() -> RunConfig:
    """A configuration to store."""
    result = RunConfig()
    result.model.num_layers, result.model.hidden_size, result.tokenizer.vocab_size = LAYERS, HIDDEN, 130
    return result


def found(root: Path) -> CheckpointDirectory:
    """The checkpoint of a run's folder."""
    checkpoint = find_checkpoint(root)
    assert checkpoint is not None
    return checkpoint


def load(mesh: Mesh, directory: Path) -> list[NamedTensor]:
    """This rank's tensors, loaded."""
    tensors = empty(mesh.layout, mesh.rank)
    load_checkpoint(directory, mesh=mesh, pieces=pieces_of(tensors))
    return tensors


def mesh_of(layout: Layout, rank: int) -> Mesh:
    """A rank without processes."""
    return Mesh(layout, rank, torch.device("cpu"), {})


def save_simulated(layout: Layout, directory: Path) -> None:
    """Write the shards that all ranks of a layout would, from this one process."""
    directory.mkdir(parents=True)
    chunks: list[Chunk] = []
    for rank in range(layout.world_size):
        chunks += owned_chunks(pieces_of(filled(layout, rank)), mesh_of(layout, rank))
    write_shards(directory, chunks, single_process_mesh().world)


def check_simulated(layout: Layout, directory: Path) -> None:
    """Load what each rank of a layout would, one after the other."""
    for rank in range(layout.world_size):
        tensors = empty(layout, rank)
        load_checkpoint(directory, mesh=single_process_mesh(), pieces=pieces_of(tensors), strict=layout.pp == 1)
        assert_true(tensors)
