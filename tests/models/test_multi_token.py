"""Multi-token prediction against its formula, written out on whole logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.data.document_mask import Item
from megalite.data.microbatch import Microbatch, with_ahead
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.nn.tokens import Tokens
from megalite.training.executor import GPTExecutor
from megalite.training.objective import TokenLoss
from tests.helpers import FP64, LATENT, LLAMA, tiny_model, tiny_tokens

BATCH, LENGTH, DEPTHS, WEIGHT = 2, 12, 3, 0.6
DOCUMENTS = np.array([[0] * 5 + [1] * 7, [0] * 12], dtype=np.int32)


def arrays(documents: bool) -> Item:
    text = tiny_tokens(BATCH, LENGTH).numpy()
    mask = np.ones((BATCH, LENGTH), dtype=bool)
    mask[0, 4] = mask[1, 7] = False  # the first is the end of a document
    positions = np.tile(np.arange(LENGTH), (BATCH, 1))
    given = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask, "position_ids": positions}
    given["sample_ids"] = np.arange(BATCH)
    return {**given, "document_ids": DOCUMENTS} if documents else given


def norm(x: Tensor, module: Any) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * module.weight


def by_formula(model: GPTStage, batch: Microbatch) -> Tensor:
    """Mean loss of the next tokens + weight / depths · sum of the depths' mean losses."""
    tokens = model._with_tables(Tokens.whole(batch.position_ids, batch.document_ids))
    assert model.embedding is not None and model.mtp is not None
    table, output = model.embedding.word_embeddings.weight, model.output_weight
    documents = batch.document_ids
    state = model(batch.tokens, tokens)
    total = F.cross_entropy((state @ output.t()).transpose(0, 1)[batch.loss_mask], batch.labels[batch.loss_mask])
    for depth, layer in enumerate(model.mtp.layers.values(), start=1):
        rows = []
        for b in range(BATCH):
            ids = [int(batch.tokens[b, i + depth]) if i + depth < LENGTH else 0 for i in range(LENGTH)]
            rows.append(norm(table[ids], layer.enorm))
        joined = torch.cat((torch.stack(rows, dim=1), norm(state, layer.hnorm)), dim=-1)
        state = norm(layer.transformer_layer(joined @ layer.eh_proj.weight.t(), tokens), layer.final_layernorm)
        losses = [
            F.cross_entropy(output @ state[i, b], batch.labels[b, i + depth])
            for b in range(BATCH)
            for i in range(LENGTH - depth)
            if batch.loss_mask[b, i + depth] and (documents is None or documents[b, i] == documents[b, i + depth])
        ]
        total = total + WEIGHT / DEPTHS * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(
    "network",
    [{**LLAMA, "untie_embeddings_and_output_weights": False}, LLAMA, LATENT],
    ids=["tied", "untied", "latent"],
)
def test_loss_and_gradients_are_those_of_the_formula(network: dict[str, Any], documents: bool) -> None:
    model = tiny_model(single_process_mesh(), FP64, mtp_num_layers=DEPTHS, init_method_std=0.2, **network)
    batch = Microbatch.from_arrays(with_ahead(arrays(documents), DEPTHS))
    expected = by_formula(model, batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    objective = TokenLoss(depths=DEPTHS, ahead_weight=WEIGHT)
    executor = GPTExecutor([model], single_process_mesh(), objective)
    count, counts = objective.normaliser([batch]), objective.normalisers_ahead([batch])
    scales = objective.scales_ahead(counts)
    executor.begin([batch], scale=1.0 / count.double(), ahead_scales=scales, dropout_key=random.fold(1))
    executor.forward(0, 0)
    executor.backward(0, 0)
    total = executor.loss_sum / count.double() + (executor.ahead_sums * scales).sum()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
    assert any(name.startswith("mtp.layers.2.eh_proj") for name in gradients)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-13)


def test_an_evaluation_reads_no_token_ahead_of_its_own() -> None:
    """So its loss is that of the main model alone."""
    model = tiny_model(single_process_mesh(), FP64, mtp_num_layers=2, **LLAMA)
    alone = tiny_model(single_process_mesh(), FP64, **LLAMA)
    batch, sums = Microbatch.from_arrays(arrays(documents=False)), []
    for each, depths in ((model, 2), (alone, 0)):
        executor = GPTExecutor([each], single_process_mesh(), TokenLoss(depths=depths))
        executor.begin([batch])
        executor.forward(0, 0)
        sums.append(executor.loss_sum.item())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("length", [1, 2, 12])
def test_what_lies_ahead_is_what_so_many_places_later_is(length: int) -> None:
    given = {name: array[:, :length] if array.ndim == 2 else array for name, array in arrays(documents=True).items()}
    found = with_ahead(given, DEPTHS)
    for b in range(BATCH):
        for depth in range(1, DEPTHS + 1):
            for i in range(length):
                inside = i + depth < length
                for ahead, name in (("ahead_tokens", "tokens"), ("ahead_labels", "labels")):
                    assert found[ahead][b, depth - 1, i] == (given[name][b, i + depth] if inside else 0)
                counts = inside and given["loss_mask"][b, i + depth] and DOCUMENTS[b, i] == DOCUMENTS[b, i + depth]
                assert found["ahead_mask"][b, depth - 1, i] == counts
