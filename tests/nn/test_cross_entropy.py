"""Vocabulary-parallel cross-entropy against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn import cross_entropy
from megalite.nn.cross_entropy import vocabulary_parallel_cross_entropy

ALONE = Group((0,), 0, None)
COLUMNS = 131


def ours(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0, wide: torch.dtype = torch.float64) -> Tensor:
    return vocabulary_parallel_cross_entropy(
        logits,
        targets,
        first_column=0,
        vocab_size=logits.shape[-1],
        group=ALONE,
        wide=wide,
        label_smoothing=smoothing,
    )


def theirs(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return flat.view(targets.shape)


def example(*shape: int, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and the gradient that flows into the losses."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, COLUMNS, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(COLUMNS, shape, generator=generator)
    return logits, targets, torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk", [1, COLUMNS, 3 * COLUMNS, 4 * COLUMNS + 1, 1 << 22])
def test_losses_and_gradients_equal_torchs_whatever_the_chunk(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, chunk: int
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", chunk)
    logits, targets, cotangent = example(5, 2)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    our_loss, their_loss = ours(a, targets, smoothing=smoothing), theirs(b, targets, smoothing)
    assert torch.allclose(our_loss, their_loss, rtol=1e-12, atol=1e-12)
    our_loss.backward(cotangent)
    their_loss.backward(cotangent)
    assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_huge_logits_do_not_overflow() -> None:
    logits, targets, _ = example(4, 2, scale=1e4)
    loss = ours(logits.to(torch.float32), targets, wide=torch.float32)
    assert loss.isfinite().all()
    assert torch.allclose(loss.double(), theirs(logits, targets), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_the_loss_of_their_fp32_values(dtype: torch.dtype) -> None:
    logits, targets, cotangent = example(7, 3)
    half = logits.to(dtype).requires_grad_()
    wide = half.detach().to(torch.float32).requires_grad_()
    loss = ours(half, targets, smoothing=0.1, wide=torch.float32)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, theirs(wide, targets, 0.1), rtol=1e-6, atol=1e-6)
    loss.backward(cotangent.to(torch.float32))
    theirs(wide, targets, 0.1).backward(cotangent.to(torch.float32))
    assert half.grad.dtype == dtype
    assert torch.allclose(half.grad.to(torch.float32), wide.grad, rtol=2.0**-8, atol=1e-7)


def _on_a_rank(mesh: Mesh, padded: int, smoothing: float) -> tuple[Tensor, Tensor]:
    logits, targets, cotangent = example(5, 2)
    rows = padded // mesh.tp.size
    first = mesh.tp.rank * rows
    mine = logits[..., first : min(first + rows, COLUMNS)].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(
        mine,
        targets,
        first_column=first,
        vocab_size=COLUMNS,
        group=mesh.tp,
        wide=torch.float64,
        label_smoothing=smoothing,
    )
    loss.backward(cotangent)
    return loss.detach(), mine.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("tp", "padded"), [(2, 132), (4, 132), (4, 136), (4, 256)])
def test_columns_cut_over_ranks_give_the_whole_vocabularys_loss_even_where_a_rank_has_none(
    pool: ProcessPool, tp: int, padded: int, smoothing: float
) -> None:
    logits, targets, cotangent = example(5, 2)
    logits.requires_grad_()
    loss = theirs(logits, targets, smoothing)
    loss.backward(cotangent)
    results = pool.run(_on_a_rank, tp, padded, smoothing, layout=Layout(tp=tp))
    for rank_loss, _ in results:
        assert torch.allclose(rank_loss, loss, rtol=1e-12, atol=1e-12)
    gathered = torch.cat([gradient for _, gradient in results], dim=-1)
    assert torch.allclose(gathered, logits.grad, rtol=1e-12, atol=1e-12)


def _with_impossible_columns(mesh: Mesh, first: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """A row in which column `first` is -inf, and one in which all columns of a rank are; targets on the other rank."""
    logits = torch.tensor([[0.5, -1.0, 0.0, 1.0], [0.5, 2.0, 0.0, 1.0]], dtype=torch.float64)
    logits[0, first] = -torch.inf
    logits[1, first : first + 2] = -torch.inf
    targets = torch.full((2,), (first + 3) % 4)
    columns = logits.chunk(mesh.tp.size, dim=1)[mesh.tp.rank].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(
        columns,
        targets,
        first_column=mesh.tp.rank * columns.shape[1],
        vocab_size=4,
        group=mesh.tp,
        wide=torch.float64,
        label_smoothing=smoothing,
    )
    loss.sum().backward()
    if mesh.tp.size == 1:
        whole = logits.clone().requires_grad_()
        assert torch.allclose(loss, theirs(whole, targets, smoothing), rtol=1e-12)
    return loss.detach(), columns.grad


@pytest.mark.parametrize(("first", "smoothing"), [(0, 0.0), (2, 0.0), (0, 0.1)])
def test_an_infinite_logit_on_a_rank_without_the_target_is_what_it_is_in_one_process(
    pool: ProcessPool, first: int, smoothing: float
) -> None:
    loss, gradient = _with_impossible_columns(single_process_mesh(), first, smoothing)
    results = pool.run(_with_impossible_columns, 2, first, smoothing, layout=Layout(tp=2))
    assert loss.isfinite().all() == (smoothing == 0)
    for rank_loss, _ in results:
        assert torch.allclose(rank_loss, loss, rtol=1e-12)
    assert torch.allclose(torch.cat([part for _, part in results], dim=1), gradient, rtol=1e-12, atol=1e-12)
