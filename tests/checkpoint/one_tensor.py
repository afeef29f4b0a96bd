"""Checkpoints of a single tensor, for tests of the folder that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.storage import Retention
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import ParamSpec, Place, replicated
from tests.helpers import pieces_of, save_checkpoint

ONE = single_process_mesh()
SPEC = ParamSpec((100,), (100,), replicated((100,), Place(Layout(), 0)))
KEEP_ALL = Retention()


def save(
    root: Path,
    iteration: int,
    retain: Retention = KEEP_ALL,
    value: float | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint whose one tensor holds its iteration (or `value`)."""
    tensor = torch.full((100,), float(iteration) if value is None else value)
    return save_checkpoint(
        root,
        iteration,
        mesh=ONE,
        pieces=pieces_of([("model.w", tensor, SPEC)]),
        config=RunConfig(),
        training_state=state or {"iteration": iteration},
        retain=retain,
    )


def value_of(path: Path) -> float:
    tensor = torch.full((100,), -1.0)
    load_checkpoint(path, mesh=ONE, pieces=pieces_of([("model.w", tensor, SPEC)]))
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
