"""The output layer for counted tokens alone: what it may change, which is nothing, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalite.data.microbatch import Microbatch
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.nn.module import named_specs
from megalite.training.executor import GPTExecutor, move
from megalite.training.objective import TokenLoss
from tests.helpers import FP64, LLAMA, VOCABULARY, tiny_model, tiny_tokens

LENGTH, WIDTH, SCALE = 24, 32, 0.125
ANSWERS: dict[str, list[list[tuple[int, int]]]] = {  # from where to where the two rows count
    "one answer each": [[(9, 14)], [(3, 11)]],
    "two answers, and a row of none": [[(2, 4), (20, 24)], []],
    "nothing counts": [[], []],
    "one token": [[], [(23, 24)]],
    "all but one": [[(0, 24)], [(1, 24)]],
    "all": [[(0, 24)], [(0, 24)]],
}


def _microbatches() -> list[Microbatch]:
    result = []
    for n, rows in enumerate(ANSWERS.values()):
        text = tiny_tokens(len(rows), LENGTH, seed=n)
        mask = torch.zeros(len(rows), LENGTH, dtype=torch.bool)
        for row, spans in enumerate(rows):
            for first, last in spans:
                mask[row, first:last] = True
        positions = torch.arange(LENGTH).expand(len(rows), -1)
        result.append(Microbatch(text[:, :-1], text[:, 1:], mask, positions, 2 * n + torch.arange(2)))
    return result


def _run(overrides: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Of one step over all microbatches: the summed loss after each, every gradient, FLOPs of each."""
    model = tiny_model(single_process_mesh(), FP64, init_method_std=0.1, **overrides)
    microbatches = _microbatches()
    work = GPTExecutor([model], single_process_mesh(), TokenLoss(0.1))
    work.begin(microbatches, scale=SCALE, dropout_key=random.fold(7))
    losses, costs = [], []
    for n in range(len(microbatches)):
        with FlopCounterMode(display=False) as counter:
            work.forward(0, n)
            work.backward(0, n)
        losses.append(work.loss_sum.item())
        costs.append(counter.get_total_flops())
    return losses, _gradients(model), costs


def _run_on_logits(overrides: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The same by torch's loss on the logits of all tokens."""
    model = tiny_model(single_process_mesh(), FP64, init_method_std=0.1, **overrides)
    losses, total = [], 0.0
    for batch in _microbatches():
        logits = model.logits(model(batch.tokens, move(batch, single_process_mesh())[1])).transpose(0, 1)
        each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none", label_smoothing=0.1)
        summed = each[batch.loss_mask.flatten()].sum()
        (summed * SCALE).backward()
        losses.append(total := total + summed.item())
    return losses, _gradients(model)


def _gradients(model: GPTStage) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p, _ in named_specs(model) if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return gradients


@pytest.mark.parametrize("overrides", [{}, LLAMA], ids=["tied", "untied"])
def test_tokens_that_do_not_count_are_left_out_of_losses_gradients_and_work(overrides: dict[str, Any]) -> None:
    losses, gradients, costs = _run(overrides)
    all_losses, all_gradients = _run_on_logits(overrides)
    assert losses == pytest.approx(all_losses, rel=1e-12)
    assert losses[1] == losses[2]  # that of nothing
    for name, expected in all_gradients.items():
        assert torch.allclose(gradients[name], expected, rtol=1e-10, atol=1e-14), name
    counted = [int(batch.loss_mask.sum()) for batch in _microbatches()]
    for cost, tokens in zip(costs, counted, strict=True):
        product = 4 * WIDTH * VOCABULARY  # of a token, without the weight's gradient, which the counter doesn't see
        assert cost - costs[0] == product * (tokens - counted[0])
