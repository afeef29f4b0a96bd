"""The output layer's loss and gradients, formed chunk by chunk, against torch's on all logits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.estimate import activations
from megalite.nn import cross_entropy
from megalite.nn.cross_entropy import OutputCrossEntropy

COLUMNS, SEQUENCE, BATCH, WIDTH = 131, 8, 3, 6
SCALE = 0.375
CHOSEN = torch.tensor([1, 4, 5, 7, 12, 23])


class Result(NamedTuple):
    losses: Tensor
    total: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def example(scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the table, targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator, dtype=torch.float64) * scale
    return hidden, weight, torch.randint(COLUMNS, (SEQUENCE * BATCH,), generator=generator)


def theirs(hidden: Tensor, weight: Tensor, targets: Tensor, chosen: Tensor | None, smoothing: float) -> Result:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    rows = hidden.flatten(0, 1)
    rows = rows if chosen is None else rows[chosen]
    losses = F.cross_entropy(rows @ weight.t(), targets, reduction="none", label_smoothing=smoothing)
    total = losses.sum() * SCALE
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Result(losses.detach(), total.detach(), hidden.grad, weight.grad)


def on_a_rank(
    mesh: Mesh, padded: int, sequence_parallel: bool, chosen: Tensor | None, smoothing: float, sizes: tuple[int, int]
) -> Result:
    """This rank's losses and total, and its parts of the gradients, without padding. `sizes`: elements of a chunk and
    of a block."""
    kept = activations.LOGITS, cross_entropy._BLOCK
    activations.LOGITS, cross_entropy._BLOCK = sizes
    try:
        hidden, weight, targets = example()
        rank, size = mesh.tp.rank, mesh.tp.size
        table = F.pad(weight, (0, 0, 0, padded - COLUMNS), value=float("nan")).chunk(size)[rank].clone()
        part = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
        table.requires_grad_()
        how = OutputCrossEntropy(mesh.tp, COLUMNS, torch.float64, sequence_parallel, smoothing)
        loss = how(part, table, targets if chosen is None else targets[chosen], chosen, SCALE)
        loss.total.backward()
    finally:
        activations.LOGITS, cross_entropy._BLOCK = kept
    assert part.grad is not None
    assert table.grad is not None
    return Result(loss.tokens, loss.total.detach(), part.grad, table.grad)


def assert_same(ours: Result, expected: Result) -> None:
    for name, a, b in zip(Result._fields, ours, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chosen", [None, CHOSEN, CHOSEN[:0]], ids=["all", "some", "none"])
@pytest.mark.parametrize("sizes", [(1, 1), (4 * COLUMNS + 1, 3 * COLUMNS), (1 << 25, 1 << 18)])
def test_losses_and_gradients_equal_torchs_whatever_the_chunk(
    smoothing: float, chosen: Tensor | None, sizes: tuple[int, int]
) -> None:
    hidden, weight, targets = example()
    expected = theirs(hidden, weight, targets if chosen is None else targets[chosen], chosen, smoothing)
    assert_same(on_a_rank(single_process_mesh(), COLUMNS, False, chosen, smoothing, sizes), expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("tp", "padded", "chosen", "smoothing"), [(2, 132, None, 0.1), (4, 136, CHOSEN, 0.0), (4, 256, None, 0.1)]
)
def test_columns_cut_over_ranks_give_the_whole_vocabularys_even_where_a_rank_has_none(
    pool: ProcessPool, tp: int, padded: int, chosen: Tensor | None, smoothing: float, sequence_parallel: bool
) -> None:
    hidden, weight, targets = example()
    expected = theirs(hidden, weight, targets if chosen is None else targets[chosen], chosen, smoothing)
    sizes = (4 * COLUMNS, COLUMNS // 8)
    results = pool.run(on_a_rank, tp, padded, sequence_parallel, chosen, smoothing, sizes, layout=Layout(tp=tp))
    table = torch.cat([each.weight_grad for each in results])
    assert (table[COLUMNS:] == 0).all()
    for each in results:
        gradient = torch.cat([rank.hidden_grad for rank in results]) if sequence_parallel else each.hidden_grad
        assert_same(Result(each.losses, each.total, gradient, table[:COLUMNS]), expected)


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight, targets = example(scale=1e4)
    how = OutputCrossEntropy(single_process_mesh().tp, COLUMNS, torch.float32, False, 0.0)
    loss = how(hidden.float(), weight.float(), targets, None, 1.0).tokens
    assert torch.allclose(loss.double(), theirs(hidden, weight, targets, None, 0.0).losses, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_the_loss_of_their_fp32_values(dtype: torch.dtype) -> None:
    hidden, weight, targets = example()
    how = OutputCrossEntropy(single_process_mesh().tp, COLUMNS, torch.float32, False, 0.1)
    x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    loss = how(x, w, targets, None, SCALE)
    assert loss.tokens.dtype == loss.total.dtype == torch.float32
    loss.total.backward()
    logits = (x.flatten(0, 1) @ w.t()).detach().float().requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    assert torch.allclose(loss.tokens, expected, rtol=1e-6, atol=1e-6)
    (expected.sum() * SCALE).backward()
    assert logits.grad is not None
    rounding, flat = torch.finfo(dtype).eps, x.detach().flatten(0, 1).float()
    for ours, a, b in ((x.grad, logits.grad, w.detach().float()), (w.grad, logits.grad.t(), flat)):
        assert ours is not None
        assert ours.dtype == dtype
        bound = 2 * rounding * (a.abs() @ b.abs()) + 1e-7  # of the gradient of a logit, and of the product
        assert ((ours.float().view(bound.shape) - a @ b).abs() <= bound).all()


def _with_impossible_columns(mesh: Mesh, first: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """A row in which column `first` is -inf, and one in which all columns of a rank are; targets on the other rank."""
    logits = torch.tensor([[0.5, -1.0, 0.0, 1.0], [0.5, 2.0, 0.0, 1.0]], dtype=torch.float64)
    logits[0, first] = -torch.inf
    logits[1, first : first + 2] = -torch.inf
    targets = torch.full((2,), (first + 3) % 4)
    how = OutputCrossEntropy(mesh.tp, 4, torch.float64, False, smoothing)
    pass_ = cross_entropy._Pass(how, torch.zeros(2, 1, 1), torch.zeros(4 // mesh.tp.size, 1), targets, None)
    columns = logits.chunk(mesh.tp.size, dim=1)[mesh.tp.rank].clone()
    losses = pass_._turn(columns, targets - pass_.first, torch.ones((), dtype=torch.float64))
    return losses, columns


@pytest.mark.parametrize(("first", "smoothing"), [(0, 0.0), (2, 0.0), (0, 0.1)])
def test_an_infinite_logit_on_a_rank_without_the_target_is_what_it_is_in_one_process(
    pool: ProcessPool, first: int, smoothing: float
) -> None:
    loss, gradient = _with_impossible_columns(single_process_mesh(), first, smoothing)
    assert loss.isfinite().all() == (smoothing == 0)
    for rank in (results := pool.run(_with_impossible_columns, 2, first, smoothing, layout=Layout(tp=2))):
        assert torch.allclose(rank[0], loss, rtol=1e-12)
    assert torch.allclose(torch.cat([part for _, part in results], dim=1), gradient, rtol=1e-12, atol=1e-12)
