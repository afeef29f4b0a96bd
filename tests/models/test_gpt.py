"""What any GPT must keep, whatever its weights: losses, the tied table, half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.nn.module import named_specs
from tests.helpers import BF16, FP32, FP64, LLAMA, VOCABULARY, tiny_model, tiny_tokens

MESH = single_process_mesh()
TEXT = tiny_tokens(3, 32)
TOKENS, LABELS = TEXT[:, :-1], TEXT[:, 1:]


def logits(model: GPTStage) -> Tensor:
    """[b, s, vocabulary]."""
    with torch.no_grad():
        return model.logits(model(TOKENS, plain_tokens(TOKENS))).transpose(0, 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("divisor", [1, 128])
def test_losses_are_the_cross_entropy_of_the_logits_without_padding(divisor: int, smoothing: float) -> None:
    model = tiny_model(MESH, FP64, make_vocab_size_divisible_by=divisor)
    hidden = model(TOKENS, plain_tokens(TOKENS))
    ours = model.loss(hidden, LABELS, label_smoothing=smoothing).tokens
    assert ours.shape == (32, 3)
    flat = logits(model).reshape(-1, VOCABULARY)
    expected = F.cross_entropy(flat, LABELS.flatten(), reduction="none", label_smoothing=smoothing)
    assert torch.allclose(ours.t().flatten(), expected, rtol=1e-12)


def test_a_tied_table_is_one_parameter_with_the_gradient_of_both_uses() -> None:
    tied = tiny_model(MESH, FP64)
    untied = tiny_model(MESH, FP64, untie_embeddings_and_output_weights=True)
    names = {name for name, _, _ in named_specs(untied)} - {name for name, _, _ in named_specs(tied)}
    assert names == {"output_layer.weight"}
    with torch.no_grad():
        untied.output_weight.copy_(tied.output_weight)
    for model in (tied, untied):
        model.loss(model(TOKENS, plain_tokens(TOKENS)), LABELS).total.backward()
    summed = untied.output_weight.grad + untied.embedding.word_embeddings.weight.grad
    assert torch.allclose(tied.output_weight.grad, summed, atol=1e-14)


@pytest.mark.parametrize("network", [{}, LLAMA], ids=["gpt2", "llama"])
def test_half_precision_logits_are_near_those_of_fp32(network: dict[str, Any]) -> None:
    a, b = (logits(tiny_model(MESH, precision, **network)) for precision in (FP32, BF16))
    assert b.dtype == torch.bfloat16
    assert (a - b.to(a.dtype)).abs().max() < 0.03 * a.abs().max()
