"""Attention by every kernel against plain sums over the keys that a query may see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.config.schema import RunConfig
from megalite.nn.attention import CoreAttention, cumulative_lengths, unfused_attention
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.module import SequenceInfo
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, SDPA, UNFUSED, tiny_build, tiny_config

LENGTH, BATCH, HEADS, WIDTH = 24, 2, 4, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 23 + [1]], dtype=torch.int32)
FLASH_CPU = AttentionBackend("sdpa", (SDPBackend.FLASH_ATTENTION,), "test")


def sequence(documents: Tensor | None = None) -> SequenceInfo:
    index = torch.arange(LENGTH)
    borders = None if documents is None else cumulative_lengths(documents)
    return SequenceInfo(index[None], index, document_ids=documents, document_borders=borders)


def heads(groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, b, heads, d], keys and values [s, b, groups, d], with gradients."""
    shapes = [(LENGTH, BATCH, n, WIDTH) for n in (HEADS, groups, groups)]
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def core(backend: AttentionBackend, groups: int, precision: Precision = FP64, **overrides: Any) -> CoreAttention:
    return CoreAttention(tiny_build(precision, num_query_groups=groups, **overrides), backend, layer=0)


def by_hand(q: Tensor, k: Tensor, v: Tensor, left: int | None = None, documents: Tensor | None = None) -> Tensor:
    """Softmax attention, one query, head and sample at a time."""
    out = torch.empty(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64)
    share = HEADS // k.shape[2]
    for b in range(BATCH):
        for i in range(LENGTH):
            seen = [
                j
                for j in range(i + 1)
                if (left is None or i - j <= left) and (documents is None or documents[b, i] == documents[b, j])
            ]
            for h in range(HEADS):
                scores = k[seen, b, h // share] @ q[i, b, h] / math.sqrt(WIDTH)
                weights = scores.exp() / scores.exp().sum()
                out[i, b, h] = weights @ v[seen, b, h // share]
    return out.flatten(2)


CASES = [
    pytest.param(None, None, id="causal"),
    pytest.param("5,0", None, id="window"),
    pytest.param("0,0", None, id="itself alone"),
    pytest.param("-1,0", None, id="unbounded window"),
    pytest.param("100,0", None, id="window beyond the sequence"),
    pytest.param(None, DOCUMENTS, id="documents"),
    pytest.param("3,0", DOCUMENTS, id="documents and window"),
]


@pytest.mark.parametrize("backend", [UNFUSED, SDPA, FLASH_CPU], ids=["unfused", "sdpa", "flash"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("window", "documents"), CASES)
def test_every_kernel_sums_over_just_the_visible_keys(
    backend: AttentionBackend, groups: int, window: str | None, documents: Tensor | None
) -> None:
    q, k, v = heads(groups)
    left = None if window is None or window.startswith("-") else int(window.split(",")[0])
    with torch.no_grad():
        expected = by_hand(q, k, v, left, documents)
    ours = core(backend, groups, window_size=window)(q, k, v, sequence(documents))
    assert (ours - expected).abs().max() < 1e-12


@pytest.mark.parametrize("backend", [SDPA, FLASH_CPU], ids=["sdpa", "flash"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("window", "documents"), CASES)
def test_gradients_of_the_kernels_equal_those_of_plain_products(
    backend: AttentionBackend, groups: int, window: str | None, documents: Tensor | None
) -> None:
    leaves = heads(groups)
    cotangent = torch.randn(LENGTH, BATCH, HEADS * WIDTH, dtype=torch.float64)
    results = [
        torch.autograd.grad(core(b, groups, window_size=window)(*leaves, sequence(documents)), leaves, cotangent)
        for b in (backend, UNFUSED)
    ]
    for ours, plain in zip(*results, strict=True):
        assert (ours - plain).abs().max() < 1e-12


@pytest.mark.parametrize("backend", [SDPA, FLASH_CPU], ids=["sdpa", "flash"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_kernels_agree_in_every_precision(
    backend: AttentionBackend, precision: Precision, documents: Tensor | None
) -> None:
    q, k, v = heads(2, precision.compute)
    a, b = (core(kernel, 2, precision)(q, k, v, sequence(documents)) for kernel in (backend, UNFUSED))
    assert a.dtype == b.dtype == precision.compute
    tolerance = 1e-5 if precision is FP32 else 2e-2
    assert (a.double() - b.double()).abs().max() < tolerance


def test_the_softmax_of_half_precision_scores_is_wide() -> None:
    """Scores of about 200 in bf16 are a unit apart: a softmax of such scores would be wrong by a factor."""
    q, k = torch.full((1, 1, 2, 64), 5.0).bfloat16(), torch.full((1, 1, 2, 64), 5.0).bfloat16()
    k[..., 1, 0] += 0.25
    v = torch.zeros_like(k)
    v[..., 1, :] = 1.0
    visible = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    ours = unfused_attention(q, k, v, visible, wide=torch.float32, drop=0.0, keys=None, head=0)
    scores = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
    assert (ours.double() - scores).abs().max() < 0.15


def test_borders_of_documents_count_the_tokens_of_the_batch_laid_end_to_end() -> None:
    assert cumulative_lengths(DOCUMENTS).tolist() == [0, 5, 17, 24, 47, 48]
    assert cumulative_lengths(torch.zeros(3, 4, dtype=torch.int32)).tolist() == [0, 4, 8, 12]
    assert cumulative_lengths(DOCUMENTS).dtype == torch.int32


def _cuda_backend(asked: str, *, documents: bool, half: bool) -> AttentionBackend:
    config = RunConfig(model=tiny_config(attention_backend=asked))
    config.data.reset_attention_mask, config.precision.bf16 = documents, half
    return choose_backend(config, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("asked", "half", "documents", "window"),
    [
        ("auto", True, False, None),
        ("auto", False, False, None),
        ("auto", True, True, None),
        ("auto", True, True, "20,0"),
        ("auto", False, True, None),
        ("flash", True, False, None),
        ("flash", True, True, None),
        ("flash", True, True, "20,0"),
        ("fused", True, False, None),
        ("fused", False, False, None),
    ],
)
@pytest.mark.parametrize("groups", [4, 2])
def test_on_cuda_every_backend_equals_plain_products(
    asked: str, half: bool, documents: bool, window: str | None, groups: int
) -> None:
    """Values and gradients; with documents this is the variable-length kernel across their borders."""
    length, width = 160, 64
    ids = torch.arange(length, device="cuda")
    bounds = torch.tensor([[33, 100], [1, 159]], device="cuda")
    document_ids = (ids[None, :, None] >= bounds[:, None, :]).sum(-1).to(torch.int32) if documents else None
    borders = None if document_ids is None else cumulative_lengths(document_ids)
    info = SequenceInfo(ids[None], ids, document_ids=document_ids, document_borders=borders)
    dtype = torch.bfloat16 if half else torch.float32
    shapes = [(length, BATCH, n, width) for n in (HEADS, groups, groups)]
    leaves = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    cotangent = torch.randn(length, BATCH, HEADS * width, device="cuda")
    precision = BF16 if half else FP32
    backend = _cuda_backend(asked, documents=documents or window is not None, half=half)
    results = []
    for kernel, cast in ((backend, dtype), (UNFUSED, torch.float32)):
        inputs = [leaf.detach().to(cast).requires_grad_() for leaf in leaves]
        attention = core(kernel, groups, precision, window_size=window, kv_channels=width)
        out = attention(*inputs, info)
        results.append((out, *torch.autograd.grad(out, inputs, cotangent.to(cast))))
    tolerance = 3e-2 if half else 2e-3
    for ours, plain in zip(*results, strict=True):
        assert (ours.to(torch.float32) - plain).abs().max() <= tolerance * plain.abs().max()
