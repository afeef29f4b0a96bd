"""Attention put together from blocks of keys, against torch's attention of all keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.nn.attention_blocks import Block, BlockKernel, CpuBlocks, CudaBlocks, PlainBlocks
from megalite.nn.context_attention import _merge

DOUBLE = torch.float64
KERNELS = [lambda: PlainBlocks(DOUBLE), CpuBlocks]


def _unchanged(weights: Tensor) -> Tensor:
    return weights


def _random(*shape: int, dtype: torch.dtype = DOUBLE, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=DOUBLE).to(device, dtype)


def _inputs(values: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2 groups, of 12 tokens."""
    return _random(2, 4, 12, 8), _random(2, 2, 12, 8), _random(2, 2, 12, values)


def _by_blocks(
    kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block], grad: Tensor
) -> tuple[Tensor, ...]:
    """The result, and gradients of query, key and value."""
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    sums = query.new_full(query.shape[:-1], float("-inf"))
    for block in blocks:
        parts = query[:, :, block.rows], key[:, :, block.columns], value[:, :, block.columns]
        _merge(out[:, :, block.rows], sums[:, :, block.rows], *kernel.forward(*parts, block))
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    for block in blocks:
        rows, columns = block.rows, block.columns
        of_queries = (each[:, :, rows] for each in (grad, query, out, sums))
        found = kernel.backward(*of_queries, key[:, :, columns], value[:, :, columns], block)
        for total, part, where in zip(grads, found, (rows, columns, columns), strict=True):
            total[:, :, where] += part
    return out, *grads


def _truth(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    out.backward(grad)
    return out.detach(), *(each.grad for each in inputs if each.grad is not None)


def _causal_blocks() -> list[Block]:
    """Of two chunks: each with itself, and the second with the first."""
    first, second = slice(0, 6), slice(6, 12)
    return [
        Block(first, first, True, None, _unchanged, 8**-0.5),
        Block(second, second, True, None, _unchanged, 8**-0.5),
        Block(second, first, False, None, _unchanged, 8**-0.5),
    ]


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "cpu"])
@pytest.mark.parametrize("values", [8, 6, 10])
def test_blocks_of_the_causal_rule_make_causal_attention(kernel: Callable[[], BlockKernel], values: int) -> None:
    query, key, value = _inputs(values)
    grad = _random(2, 4, 12, values)
    found = _by_blocks(kernel(), query, key, value, _causal_blocks(), grad)
    truth = _truth(query, key, value, torch.ones(12, 12, dtype=torch.bool).tril(), grad)
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "cpu"])
def test_a_query_that_sees_no_key_of_a_block_is_as_if_there_were_none(kernel: Callable[[], BlockKernel]) -> None:
    query, key, value = _inputs()
    grad, documents = _random(2, 4, 12, 8), torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    halves = slice(0, 6), slice(6, 12)
    blocks = [
        Block(rows, columns, False, mask[:, :, rows, columns], _unchanged, 8**-0.5)
        for rows in halves
        for columns in (rows, *(each for each in halves if each != rows))  # its own first
    ]
    found = _by_blocks(kernel(), query, key, value, blocks, grad)
    for ours, theirs in zip(found, _truth(query, key, value, mask, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_dropped_weights_are_those_of_whole_rows() -> None:
    """The truth drops from the softmax over all keys."""
    query, key, value = (each.clone().requires_grad_() for each in _inputs())
    factor = (_random(2, 2, 2, 12, 12) > 0).to(DOUBLE) * 2.0
    grad = _random(2, 4, 12, 8)
    scores = query.unflatten(1, (2, 2)) @ key.unsqueeze(2).transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), float("-inf")).softmax(dim=-1)
    out = ((weights * factor) @ value.unsqueeze(2)).flatten(1, 2)
    out.backward(grad)

    def dropping(block: Block) -> Block:
        return replace(block, dropped=lambda weights: weights * factor[..., block.rows, block.columns])

    blocks = [dropping(block) for block in _causal_blocks()]
    plain = (each.detach() for each in (query, key, value))
    found = _by_blocks(PlainBlocks(DOUBLE), *plain, blocks, grad)
    for ours, theirs in zip(found, (out.detach(), query.grad, key.grad, value.grad), strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuda_blocks_make_causal_attention(dtype: torch.dtype) -> None:
    shapes = (2, 4, 12, 16), (2, 2, 12, 16), (2, 2, 12, 16)
    query, key, value = (_random(*shape, dtype=dtype, device="cuda") for shape in shapes)
    grad = _random(2, 4, 12, 16, dtype=dtype, device="cuda")
    found = _by_blocks(CudaBlocks(), query, key, value, _causal_blocks(), grad)
    mask = torch.ones(12, 12, dtype=torch.bool, device="cuda").tril()
    truth = _truth(query.double(), key.double(), value.double(), mask, grad.double())
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.02, atol=0.02)
