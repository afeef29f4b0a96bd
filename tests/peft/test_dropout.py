"""LoRA's dropout: how much it drops, what it makes of the rest, and that no two masks are one.

A and B are identities and the scale is 1, so what an adapter adds to zeros is its input after the dropout.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.schema_finetune import PeftConfig
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.nn.tokens import Tokens
from megalite.peft.apply import apply_peft
from megalite.peft.modules import linears_of
from tests.helpers import FP64, LLAMA, tiny_model

LENGTH, BATCH, WIDTH, DROP = 64, 4, 32, 0.3
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEYS = random.fold(7, torch.arange(20, 20 + BATCH))


def _model(drop: float = DROP, targets: str = "all-linear") -> GPTStage:
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64, **LLAMA | {"ffn_hidden_size": WIDTH})
    peft = PeftConfig(peft="lora", lora_rank=WIDTH, lora_alpha=WIDTH, lora_dropout=drop, lora_target_modules=[targets])
    apply_peft([model], peft, mesh=mesh, precision=FP64, seed=1)
    return model


@torch.no_grad()
def _added(model: GPTStage, part: str, layer: int = 0, keys: Tensor | None = KEYS) -> Tensor:
    """What the adapter of one part adds for an input of ones [s, b, outputs of the part]; others add nothing."""
    base = model.decoder.layers[str(layer)].get_submodule(linears_of(model.config, layer)[part])
    for pair in base.lora.children():
        pair.a.copy_(torch.eye(WIDTH))
        pair.b.zero_()
    b = base.lora.get_submodule(part).b
    b.copy_(torch.eye(b[..., 0].numel(), WIDTH).view(b.shape))
    tokens = Tokens.whole(torch.arange(LENGTH)[None])
    x = torch.ones(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    zeros = torch.zeros(LENGTH, BATCH, base.weight[..., 0].numel(), dtype=torch.float64)
    plain = base.lora(zeros.clone(), x, tokens)
    outputs = plain[0, 0] == 1  # in evaluation all is there, exactly
    assert torch.equal(plain, outputs.double().expand_as(plain))
    assert outputs.sum() == b[..., 0].numel()
    result: Tensor = base.lora(zeros, x, replace(tokens, dropout_keys=keys))
    assert not result[..., ~outputs].any()
    return result[..., outputs]


@pytest.mark.parametrize("drop", [0.1, 0.6])
@pytest.mark.parametrize("part", PARTS)
def test_the_share_asked_for_is_dropped_and_the_rest_scaled_up(part: str, drop: float) -> None:
    added = _added(_model(drop), part)
    kept = added[added != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - drop)), rtol=1e-12)
    count = added.numel()
    assert abs(len(kept) / count - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / count)


def test_an_adapter_alone_beside_its_layer_drops_too() -> None:
    assert torch.equal(_added(_model(targets="q_proj"), "q_proj"), _added(_model(), "q_proj"))


def test_no_two_adapters_and_no_two_samples_have_one_mask() -> None:
    model = _model()
    masks = {(part, layer): (_added(model, part, layer) != 0).double() for part in PARTS for layer in (0, 1)}
    adapters = torch.stack([mask[:, :, :16].flatten() for mask in masks.values()])  # keys and values have 16 outputs
    samples = masks["o_proj", 0].transpose(0, 1).flatten(1)
    tokens = masks["o_proj", 0].flatten(1)
    for rows in (adapters, samples, tokens):
        likeness = torch.corrcoef(rows) - torch.eye(len(rows))
        assert likeness.abs().max().item() < 6 / math.sqrt(rows.shape[1])


def test_without_keys_or_a_rate_nothing_is_dropped() -> None:
    for part in PARTS:
        assert (_added(_model(), part, keys=None) == 1).all()
        assert (_added(_model(0.0), part) == 1).all()


def test_every_step_and_sample_draws_its_own_mask_and_the_same_one_again() -> None:
    model = _model()
    first = _added(model, "down_proj")
    assert torch.equal(first, _added(model, "down_proj"))
    other = _added(model, "down_proj", keys=KEYS + 1)
    assert 0.3 < ((first != 0) != (other != 0)).double().mean() < 0.54  # 2 · 0.3 · 0.7 of them differ
