"""What any GPT must keep, whatever its weights: causality, borders of documents, losses, stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.models.stages import StageSpan
from megalite.nn.module import named_specs
from megalite.nn.tokens import Tokens
from tests.helpers import BF16, FP32, FP64, LLAMA, VOCABULARY, tiny_model, tiny_tokens

MESH = single_process_mesh()
NETWORKS: dict[str, dict[str, Any]] = {"gpt2": {"init_method_std": 0.2}, "llama": {**LLAMA, "init_method_std": 0.2}}
TEXT = tiny_tokens(3, 32)
TOKENS, LABELS = TEXT[:, :-1], TEXT[:, 1:]


def logits(
    model: GPTStage, ids: Tensor = TOKENS, positions: Tensor | None = None, documents: Tensor | None = None
) -> Tensor:
    """[b, s, vocabulary]."""
    with torch.no_grad():
        tokens = plain_tokens(ids) if positions is None else Tokens.whole(positions)
        tokens = replace(tokens, queries=replace(tokens.queries, documents=documents))
        return model.logits(model(ids, tokens)).transpose(0, 1)


@pytest.mark.parametrize("backend", ["auto", "unfused", "flash"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_token_changes_no_earlier_logits_and_all_later_ones(network: str, backend: str) -> None:
    model = tiny_model(MESH, FP64, attention_backend=backend, **NETWORKS[network])
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCABULARY
    difference = (logits(model) - logits(model, changed)).abs().amax(-1)
    assert (difference[:, :10] == 0).all()
    assert (difference[:, 10:] > 1e-9).all()


@pytest.mark.parametrize("backend", ["auto", "unfused", "flash"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("window", [None, "6,0"])
def test_a_token_of_an_earlier_document_changes_nothing_in_a_later_one(
    network: str, backend: str, window: str | None
) -> None:
    model = tiny_model(MESH, FP64, attention_backend=backend, window_size=window, **NETWORKS[network])
    documents = (torch.arange(32)[None] >= torch.tensor([12, 20, 31])[:, None]).to(torch.int32)
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    a, b = (logits(model, tokens, documents=documents) for tokens in (TOKENS, changed))
    assert torch.equal(a[documents == 1], b[documents == 1])
    assert ((a - b).abs().amax(-1)[:, 5:12] > 1e-9).all()


@pytest.mark.parametrize("network", NETWORKS)
def test_a_document_with_its_own_positions_is_computed_as_if_it_were_alone(network: str) -> None:
    model = tiny_model(MESH, FP64, **NETWORKS[network])
    documents = (torch.arange(32)[None] >= 12).to(torch.int32).expand(3, 32)
    positions = (torch.arange(32) - 12 * (torch.arange(32) >= 12))[None].expand(3, 32)
    packed = logits(model, documents=documents, positions=positions)
    assert (packed[:, :12] - logits(model, TOKENS[:, :12])).abs().max() < 1e-12
    assert (packed[:, 12:] - logits(model, TOKENS[:, 12:])).abs().max() < 1e-12


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
    assert untied.embedding is not None
    assert tied.output_weight.grad is not None
    summed = untied.output_weight.grad + untied.embedding.word_embeddings.weight.grad
    assert torch.allclose(tied.output_weight.grad, summed, atol=1e-14)


def dropped(keys: Tensor, tokens: Tensor) -> Tokens:
    return replace(plain_tokens(tokens), dropout_keys=keys)


def test_a_samples_dropout_is_the_same_wherever_it_is_in_the_batch() -> None:
    model = tiny_model(MESH, FP64, hidden_dropout=0.1, attention_dropout=0.1)
    keys = random.fold(1234, "dropout", torch.arange(3))
    whole = model(TOKENS, dropped(keys, TOKENS))
    assert torch.equal(whole, model(TOKENS, dropped(keys, TOKENS)))
    order = torch.tensor([2, 0])
    part = model(TOKENS[order], dropped(keys[order], TOKENS[order]))
    assert torch.allclose(part, whole[:, order], atol=1e-12)
    other = model(TOKENS, dropped(random.fold(1235, "dropout", torch.arange(3)), TOKENS))
    assert not torch.allclose(other, whole, atol=1e-2)
    evaluation = model(TOKENS, plain_tokens(TOKENS))
    assert not torch.allclose(evaluation, whole, atol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_one_after_the_other_are_the_whole_model(tied: bool) -> None:
    """Forward and every gradient bit by bit; the copies of a tied table have parts that sum to the whole's."""
    overrides = {"num_layers": 3, "untie_embeddings_and_output_weights": not tied}
    whole = tiny_model(MESH, FP64, **overrides)
    stages = (0, 2) if tied else None
    spans = [StageSpan(0, 1, True, False, stages), StageSpan(1, 2, False, False), StageSpan(2, 3, False, True, stages)]
    parts = [tiny_model(MESH, FP64, span=span, **overrides) for span in spans]
    info = plain_tokens(TOKENS)
    x = TOKENS
    for part in parts:
        x = part(x, info)
    expected = whole(TOKENS, info)
    assert torch.equal(x, expected)
    for model, hidden in ((parts[-1], x), (whole, expected)):
        model.loss(hidden, LABELS).total.backward()
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter, _ in named_specs(part):
            gradients[name] = gradients.get(name, 0) + parameter.grad  # type: ignore[operator]
    for name, parameter, _ in named_specs(whole):
        if tied and name == "embedding.word_embeddings.weight":
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-15)
        else:
            assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("network", NETWORKS)
def test_half_precision_logits_are_near_those_of_fp32(network: str) -> None:
    overrides = {k: v for k, v in NETWORKS[network].items() if k != "init_method_std"}
    wide, half = (tiny_model(MESH, precision, **overrides) for precision in (FP32, BF16))
    a, b = logits(wide), logits(half)
    assert b.dtype == torch.bfloat16
    assert (a - b.to(a.dtype)).abs().max() < 0.03 * a.abs().max()
