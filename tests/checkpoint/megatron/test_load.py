"""Checkpoints of Megatron-LM become ours: the logits are megatron-core's, the tensors bitwise the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint, read_checkpoint_config
from megalite.checkpoint.megatron.load import megatron_to_megalite
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.models.whole import build_whole, outputs
from megalite.nn.module import named_specs
from tests.checkpoint.logical import found
from tests.checkpoint.megatron import models
from tests.checkpoint.megatron.models import CASES, LENGTH, VOCABULARY


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    with models.one_rank():
        yield


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def converted(source: Path, root: Path) -> Tensor:
    """Logits of what a checkpoint becomes."""
    megatron_to_megalite(source, root, build_whole)
    checkpoint, mesh = found(root), single_process_mesh()
    config = read_checkpoint_config(checkpoint)
    assert config.model.model_vocab_size == VOCABULARY
    model = build_whole(config, VOCABULARY, mesh)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(checkpoint, mesh=mesh, pieces=pieces)
    return outputs(model, tokens())


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    print(f"logits: largest difference {difference:.3g}, largest logit {largest:.3g}")
    assert difference < 2e-5
    assert largest > 0.3


@pytest.mark.parametrize("case", CASES)
def test_logits_of_both_formats_are_those_of_megatron_core(case: str, tmp_path: Path) -> None:
    args = models.arguments(case)
    model = models.model_of(args)
    theirs = models.logits_of(model, tokens())
    models.save_torch_dist(tmp_path / "dist", args, model)
    models.save_ranks(tmp_path / "ranks", args, model)
    assert_close(converted(tmp_path / "dist", tmp_path / "a"), theirs)
    assert_close(converted(tmp_path / "ranks", tmp_path / "b"), theirs)
