"""Attention by every kernel against plain sums over the keys that a query may see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.config.schema import RunConfig
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.attention_kernels import core_attention
from megalite.nn.tokens import Tokens, cumulative_lengths
from megalite.precision.policy import Precision
from tests.helpers import BF16, FP32, FP64, SDPA, UNFUSED, tiny_build, tiny_config

LENGTH, BATCH, HEADS, WIDTH = 24, 2, 4, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 23 + [1]], dtype=torch.int32)
FLASH_CPU = AttentionBackend("sdpa", (SDPBackend.FLASH_ATTENTION,), "test")


def sequence(documents: Tensor | None = None, length: int = LENGTH, device: str = "cpu") -> Tokens:
    tokens = Tokens.whole(torch.arange(length, device=device)[None], documents)
    return tokens if documents is None else replace(tokens, borders=cumulative_lengths(documents))


def attend(
    backend: AttentionBackend, leaves: list[Tensor], tokens: Tokens, precision: Precision = FP64, **overrides: Any
) -> Tensor:
    """Attention [s, b, heads · width of the values] by a kernel."""
    core = core_attention(tiny_build(precision, num_query_groups=leaves[1].shape[2], **overrides), backend)
    q, k, v = leaves
    return core(q, k, v, replace(tokens, mask=core.mask(tokens)), 0)


def heads(groups: int, dtype: torch.dtype = torch.float64, value_width: int = WIDTH) -> list[Tensor]:
    """Queries [s, b, heads, d], keys and values [s, b, groups, d], with gradients."""
    shapes = [(HEADS, WIDTH), (groups, WIDTH), (groups, value_width)]
    return [torch.randn(LENGTH, BATCH, *shape).to(dtype).requires_grad_() for shape in shapes]


def by_hand(leaves: list[Tensor], left: int | None = None, documents: Tensor | None = None) -> Tensor:
    """Softmax attention, one query and sample at a time over the keys that it sees."""
    q, k, v = leaves
    k, v = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    rows = []
    for i in range(LENGTH):
        for b in range(BATCH):
            near = range(0 if left is None else max(0, i - left), i + 1)
            seen = [j for j in near if documents is None or documents[b, i] == documents[b, j]]
            weights = ((k[seen, b] * q[i, b]).sum(-1) / math.sqrt(WIDTH)).softmax(0)  # [keys, heads]
            rows.append((weights[..., None] * v[seen, b]).sum(0).flatten())
    return torch.stack(rows).view(LENGTH, BATCH, -1)


@pytest.mark.parametrize("backend", [UNFUSED, SDPA, FLASH_CPU], ids=["unfused", "sdpa", "flash"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("window", "documents"),
    [
        pytest.param(None, None, id="causal"),
        pytest.param("5,0", None, id="window"),
        pytest.param("0,0", None, id="itself alone"),
        pytest.param("-1,0", None, id="unbounded window"),
        pytest.param(None, DOCUMENTS, id="documents"),
        pytest.param("3,0", DOCUMENTS, id="documents and window"),
    ],
)
def test_every_kernel_sums_over_just_the_visible_keys_in_values_and_gradients(
    backend: AttentionBackend, groups: int, window: str | None, documents: Tensor | None
) -> None:
    leaves = heads(groups)
    left = None if window is None or window.startswith("-") else int(window.split(",")[0])
    expected, ours = by_hand(leaves, left, documents), attend(backend, leaves, sequence(documents), window_size=window)
    cotangent = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, leaves, cotangent) for out in (ours, expected))
    for mine, truth in [(ours, expected), *zip(*gradients, strict=True)]:
        assert (mine - truth).abs().max() < 1e-12


@pytest.mark.parametrize("backend", [UNFUSED, SDPA, FLASH_CPU], ids=["unfused", "sdpa", "flash"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_values_may_be_wider_or_narrower_than_queries_and_keys(
    backend: AttentionBackend, documents: Tensor | None
) -> None:
    for width in (4, 16):
        leaves = heads(2, value_width=width)
        ours, truth = attend(backend, leaves, sequence(documents)), by_hand(leaves, documents=documents)
        assert (ours - truth).abs().max() < 1e-12
        weights = torch.randn_like(truth)
        found, expected = (torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, truth))
        assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) < 1e-12


@pytest.mark.parametrize("backend", [UNFUSED, SDPA, FLASH_CPU], ids=["unfused", "sdpa", "flash"])
@pytest.mark.parametrize(("precision", "tolerance"), [(FP32, 1e-5), (BF16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_every_precision_is_as_exact_as_it_can_be(
    backend: AttentionBackend, precision: Precision, tolerance: float, documents: Tensor | None
) -> None:
    leaves = heads(2, precision.compute)
    ours = attend(backend, leaves, sequence(documents), precision)
    assert ours.dtype == precision.compute
    assert (ours - by_hand([leaf.double() for leaf in leaves], documents=documents)).abs().max() < tolerance


def test_the_softmax_of_half_precision_scores_is_wide() -> None:
    """Scores of about 200 in bf16 are a unit apart: a softmax of such scores would be wrong by a factor."""
    q, k = torch.full((2, 1, 4, 64), 5.0).bfloat16(), torch.full((2, 1, 4, 64), 5.0).bfloat16()
    k[1, ..., 0] += 0.25
    v = torch.zeros_like(k)
    v[1] = 1.0
    ours = attend(UNFUSED, [q, k, v], sequence(length=2), BF16)
    weights = (torch.einsum("bhd,kbhd->kbh", q[1].double(), k.double()) / 8).softmax(0)
    assert (ours[1].double() - weights[1].repeat_interleave(64, dim=-1)).abs().max() < 0.15


def test_borders_of_documents_count_the_tokens_of_the_batch_laid_end_to_end() -> None:
    assert cumulative_lengths(DOCUMENTS).tolist() == [0, 5, 17, 24, 47, 48]
    assert cumulative_lengths(torch.zeros(3, 4, dtype=torch.int32)).tolist() == [0, 4, 8, 12]
    assert cumulative_lengths(DOCUMENTS).dtype == torch.int32


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
    length, width, precision = 160, 64, BF16 if half else FP32
    config = RunConfig(model=tiny_config(attention_backend=asked))
    config.data.reset_attention_mask, config.precision.bf16 = documents or window is not None, half
    bounds = torch.tensor([[33, 100], [1, 159]], device="cuda")
    ids = (torch.arange(length, device="cuda")[None, :, None] >= bounds[:, None, :]).sum(-1).to(torch.int32)
    tokens = sequence(ids if documents else None, length, "cuda")
    leaves = [
        torch.randn(length, BATCH, n, width, device="cuda").to(precision.compute) for n in (HEADS, groups, groups)
    ]
    cotangent = torch.randn(length, BATCH, HEADS * width, device="cuda")
    results = []
    for kernel, cast in ((choose_backend(config, "cuda"), precision.compute), (UNFUSED, torch.float32)):
        inputs = [leaf.to(precision.compute).to(cast).requires_grad_() for leaf in leaves]
        out = attend(kernel, inputs, tokens, precision, window_size=window, kv_channels=width)
        results.append((out, *torch.autograd.grad(out, inputs, cotangent.to(cast))))
    tolerance = 3e-2 if half else 2e-3
    for ours, plain in zip(*results, strict=True):
        assert (ours.to(torch.float32) - plain).abs().max() <= tolerance * plain.abs().max()
