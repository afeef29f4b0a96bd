"""The embedding table: lookups, where its gradient goes, and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.embedding import PositionEmbedding, VocabularyParallelEmbedding, lookup, padded_vocabulary
from megalite.nn.module import initialize
from tests.helpers import BF16, FixedSink, tiny_build


@pytest.mark.parametrize("sink", [FixedSink(torch.zeros(7, 3, dtype=torch.float64)), None], ids=["sink", "no sink"])
def test_it_is_torchs_embedding_and_its_sink_if_it_has_one_gets_the_sum_over_backwards(sink: FixedSink | None) -> None:
    table = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
    table.gradient_sink = sink  # type: ignore[attr-defined]
    plain = table.detach().clone().requires_grad_()
    for _ in range(3):
        ids, cotangent = torch.randint(7, (4, 2)), torch.randn(4, 2, 3, dtype=torch.float64)
        ours, theirs = lookup(table, ids), F.embedding(ids, plain)
        assert torch.equal(ours, theirs)
        ours.backward(cotangent)
        theirs.backward(cotangent)
    assert sink is None or table.grad is None
    assert torch.allclose(table.grad if sink is None else sink.target(), plain.grad, atol=1e-14)


def test_a_frequent_tokens_half_precision_gradient_is_summed_in_fp32() -> None:
    """In bf16 the sum of ones stops at 256."""
    table = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    table.gradient_sink = FixedSink(torch.zeros(3, 2))  # type: ignore[attr-defined]
    lookup(table, torch.ones(1000, dtype=torch.int64)).sum().backward()
    assert torch.equal(table.gradient_sink.target(), torch.tensor([[0.0, 0], [1000, 1000], [0, 0]]))


@pytest.mark.parametrize(
    ("size", "divisor", "tp", "rows"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (131, 1, 1, 131),
        (131, 1, 2, 132),
        (131, 128, 1, 256),
        (131, 128, 4, 512),
        (256, 128, 2, 256),
    ],
)
def test_the_vocabulary_is_padded_to_the_next_multiple_of_divisor_times_tp(
    size: int, divisor: int, tp: int, rows: int
) -> None:
    assert padded_vocabulary(size, divisor, tp) == rows


def test_padding_rows_start_at_zero_and_never_get_a_gradient() -> None:
    layer = VocabularyParallelEmbedding(tiny_build(make_vocab_size_divisible_by=128), 131, None)
    initialize(layer, 0)
    assert layer.weight.shape == (256, 32)
    assert (layer.weight[131:] == 0).all()
    assert (layer.weight[:131] != 0).all()
    layer(torch.arange(131)[None]).square().sum().backward()
    assert (layer.weight.grad[131:] == 0).all()
    assert (layer.weight.grad[:131] != 0).any(dim=1).all()


def test_the_table_is_in_the_decoupled_learning_rate_group_and_positions_are_not() -> None:
    build = tiny_build(BF16)
    assert VocabularyParallelEmbedding(build, 131, None).param_specs["weight"].treatment.lr_group == "decoupled"
    positions = PositionEmbedding(build)
    assert positions.param_specs["weight"].treatment.lr_group == "default"
    assert positions.weight.dtype == torch.bfloat16


def _rows_beside_an_infinite_one(mesh: Mesh) -> tuple[Tensor, Tensor]:
    layer = VocabularyParallelEmbedding(tiny_build(mesh=mesh), 8, None)
    initialize(layer, 0)
    rows = layer.weight.shape[0]
    with torch.no_grad():
        layer.weight[0] = torch.inf  # of tokens 0 and, with two ranks, 4
    tokens = torch.tensor([[1, 2, 3, 5, 6, 7]])
    result = layer(tokens)
    result.backward(torch.full_like(result, torch.inf))
    used = tokens[(tokens // rows == mesh.tp.rank)] % rows
    unused = torch.ones(rows, dtype=torch.bool).index_fill(0, used, False)
    return result.detach(), layer.weight.grad[unused]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_row_that_is_infinite_reaches_no_token_but_its_own_and_infinite_gradients_no_other_row(
    pool: ProcessPool, tp: int
) -> None:
    for result, unused in pool.run(_rows_beside_an_infinite_one, tp, layout=Layout(tp=tp)):
        assert result.isfinite().all()
        assert (unused == 0).all()
