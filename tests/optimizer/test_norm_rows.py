"""Large parameters' squares are summed in rows: precise, and the same however they are sharded."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import units_of
from megalite.optimizer.buckets import LARGE, ROW, build_buckets
from megalite.optimizer.gradient_norm import OwnedViews, global_names
from megalite.optimizer.sharding import Sharding
from tests.helpers import FP32, data_mesh, tiny_model

ONE = single_process_mesh()
WIDE = {"hidden_size": 128, "ffn_hidden_size": 1100, "num_layers": 1}  # 140,800 elements: no multiple of a row


def squares(how: Sharding, ranks: int) -> tuple[list[float], float]:
    """Sums of squares of the same gradients over all ranks of a layout without processes, and the exact total."""
    names: list[str] = []
    totals: list[float] = []
    exact = 0.0
    for rank in range(ranks):
        mesh = data_mesh(Layout(dp=ranks), rank)
        buckets = build_buckets(units_of([tiny_model(mesh, FP32, **WIDE)]), mesh, FP32, how)
        names = global_names(buckets, ONE)
        for bucket in buckets:
            for slot, piece in bucket.pieces(bucket.held_grads):
                generator = torch.Generator().manual_seed(len(slot.name))
                whole = torch.randn(slot.stop - slot.start, generator=generator)
                piece.flat.copy_(whole[piece.start : piece.start + piece.flat.numel()])
                exact += piece.flat.double().square().sum().item()
        pieces = [piece for bucket in buckets for _, piece in bucket.pieces(bucket.held_grads)]
        for piece in pieces:  # each data-parallel rank is the first of its own replica here
            assert all(box.owner == rank for box in piece.spec.boxes)
        mine = OwnedViews(pieces, names, mesh, sharded=False).squares()
        totals = mine if not totals else [a + b for a, b in zip(totals, mine, strict=True)]
    return totals, exact


def test_the_model_of_these_tests_has_large_parameters() -> None:
    assert WIDE["hidden_size"] * WIDE["ffn_hidden_size"] >= LARGE
    assert WIDE["hidden_size"] * WIDE["ffn_hidden_size"] % ROW


def test_rows_are_precise_far_beyond_fp32() -> None:
    totals, exact = squares(Sharding(), 1)
    assert math.fsum(totals) == pytest.approx(exact, rel=5e-8)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [None, 1, 200_000])
def test_shards_sum_the_same_rows(ranks: int, size: int | None) -> None:
    whole, _ = squares(Sharding(), 1)
    shared, _ = squares(Sharding(state=True, bucket_size=size), ranks)
    assert shared == pytest.approx(whole, rel=1e-13)
