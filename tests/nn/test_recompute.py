"""Recomputed activations give the same bits as kept ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.models.gpt import GPTStage, plain_tokens
from megalite.models.stages import whole_model
from megalite.nn.module import initialize, named_specs
from megalite.nn.recompute import Recompute
from megalite.training.memory import PeakMemory
from tests.helpers import FP32, LLAMA, UNFUSED, VOCABULARY, tiny_build, tiny_tokens


def _step(recompute: Recompute, **overrides: object) -> tuple[Tensor, dict[str, Tensor]]:
    build = dataclasses.replace(
        tiny_build(FP32, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1, **overrides), recompute=recompute
    )
    model = GPTStage(build, VOCABULARY, whole_model(4), UNFUSED)
    initialize(model, 1)
    tokens = tiny_tokens(2, 16)
    info = dataclasses.replace(plain_tokens(tokens[:, :-1]), dropout_keys=torch.tensor([5, 6]))
    loss = model.loss(model(tokens[:, :-1], info), tokens[:, 1:]).total
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter, _ in named_specs(model)}


@pytest.mark.parametrize("network", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(layers_at_once=1),
        Recompute(layers_at_once=3),
        Recompute(first_layers=2),
        Recompute(modules=frozenset({"core_attn"})),
        Recompute(modules=frozenset({"layernorm"})),
        Recompute(modules=frozenset({"core_attn", "mlp", "layernorm"})),
    ],
    ids=["uniform 1", "uniform 3", "block 2", "core attention", "norms", "all modules"],
)
def test_recompute_changes_no_bit(recompute: Recompute, network: dict[str, object]) -> None:
    loss, gradients = _step(recompute, **network)
    plain_loss, plain_gradients = _step(Recompute(), **network)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in plain_gradients)


def _kept(**network: object) -> Callable[..., int]:
    """Bytes that are there after a forward, beyond the parameters, with these modules recomputed."""
    tokens = tiny_tokens(2, 16)

    def measure(*modules: str, **more: int) -> int:
        recompute = Recompute(modules=frozenset(modules), **more)
        build = dataclasses.replace(tiny_build(FP32, num_layers=4, **network), recompute=recompute)
        model = GPTStage(build, VOCABULARY, whole_model(4), UNFUSED)
        initialize(model, 1)
        with PeakMemory(torch.device("cpu")) as memory:
            result = model(tokens[:, :-1], plain_tokens(tokens[:, :-1]))
            assert result.requires_grad
            return memory.live

    return measure


@pytest.mark.parametrize(
    "network", [{}, {"apply_layernorm_1p": True}, LLAMA], ids=["gpt2", "weights plus one", "llama"]
)
def test_every_recomputed_module_keeps_less_by_what_it_would_keep(network: dict[str, Any]) -> None:
    kept = _kept(**network)
    plain, tokens, layers, hidden = kept(), 2 * 16, 4, 32
    assert kept(layers_at_once=1) < kept(first_layers=2) < plain
    assert kept("core_attn") < plain
    inner = 48 * 3 if "swiglu" in network else 2 * 128  # what lies between the two linear layers
    told = 16 * 16 + 2 * 16 * 8  # what a recomputed module is told of its tokens: their mask, positions and places
    assert kept("mlp") <= plain - layers * tokens * inner * 4 + told
    normed = layers * 2 * tokens * hidden * 4  # the results of both norms
    assert kept("layernorm") <= plain - normed + told
    assert kept("mlp", "layernorm") <= kept("mlp") - normed
    assert kept("core_attn", "mlp", "layernorm") <= kept("core_attn", "mlp") - normed
