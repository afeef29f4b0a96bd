"""Recomputed activations give the same bits as kept ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megalite.models.gpt import GPTStage, plain_info
from megalite.models.stages import whole_model
from megalite.nn.module import initialize, named_specs
from megalite.nn.recompute import Recompute
from tests.helpers import FP32, LLAMA, UNFUSED, VOCABULARY, tiny_build, tiny_tokens


def _step(recompute: Recompute, **overrides: object) -> tuple[Tensor, dict[str, Tensor]]:
    build = dataclasses.replace(
        tiny_build(FP32, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1, **overrides), recompute=recompute
    )
    model = GPTStage(build, VOCABULARY, whole_model(4), UNFUSED)
    initialize(model, 1)
    tokens = tiny_tokens(2, 16)
    info = dataclasses.replace(plain_info(tokens[:, :-1]), dropout_keys=torch.tensor([5, 6]))
    loss = model.token_losses(model(tokens[:, :-1], info), tokens[:, 1:]).sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter, _ in named_specs(model)}


@pytest.mark.parametrize("network", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(units=1),
        Recompute(units=3),
        Recompute(first_layers=2),
        Recompute(modules=frozenset({"core_attn"})),
        Recompute(modules=frozenset({"core_attn", "mlp", "layernorm"})),
    ],
    ids=["uniform 1", "uniform 3", "block 2", "core attention", "all modules"],
)
def test_recompute_changes_no_bit(recompute: Recompute, network: dict[str, object]) -> None:
    loss, gradients = _step(recompute, **network)
    plain_loss, plain_gradients = _step(Recompute(), **network)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in plain_gradients)


def test_recompute_keeps_less() -> None:
    """Count the bytes that the graph saves."""

    def saved(recompute: Recompute) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            build = dataclasses.replace(tiny_build(FP32, num_layers=4), recompute=recompute)
            model = GPTStage(build, VOCABULARY, whole_model(4), UNFUSED)
            initialize(model, 1)
            tokens = tiny_tokens(2, 16)
            model(tokens[:, :-1], plain_info(tokens[:, :-1])).sum()
        return total

    assert saved(Recompute(units=1)) < saved(Recompute(first_layers=2)) < saved(Recompute())
    assert saved(Recompute(modules=frozenset({"core_attn"}))) < saved(Recompute())
