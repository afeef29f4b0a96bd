"""What is added to a model: initial values, places, prompts from text, masks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.models.gpt import plain_tokens
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.attention_kernels import core_attention
from megalite.nn.linear import linear
from megalite.nn.module import named_specs
from megalite.nn.tokens import Tokens
from megalite.peft.adapter import plan_adapter
from megalite.peft.apply import apply_peft, owned_parameters
from megalite.peft.virtual import backend_problem
from tests.helpers import FP64, LLAMA, UNFUSED, assert_tiled, data_mesh, set_fields, tiny_build, tiny_model, tiny_tokens

KINDS = {
    "lora": PeftConfig(peft="lora", lora_rank=2, lora_target_modules=["all-linear"]),
    "prefix": PeftConfig(peft="prefix", num_virtual_tokens=3),
    "network": PeftConfig(peft="prefix", num_virtual_tokens=3, prefix_projection=True),
    "prompt": PeftConfig(peft="prompt", num_virtual_tokens=3),
}


def test_lora_starts_as_nothing_and_a_uniformly_within_one_over_the_root_of_its_inputs() -> None:
    mesh = single_process_mesh()
    model, tokens = tiny_model(mesh, FP64, **LLAMA), tiny_tokens(2, 9)[:, :-1]
    info = plain_tokens(tokens)
    before = model(tokens, info)
    apply_peft([model], replace(KINDS["lora"], lora_rank=64), mesh=mesh, precision=FP64, seed=1)
    assert torch.equal(model(tokens, info), before)
    for name, parameter, spec in named_specs(model):
        if name.endswith(".a"):
            bound = spec.shape[-1] ** -0.5
            assert 0.95 * bound < parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
            assert abs(parameter.mean().item()) < 0.1 * bound
        if name.endswith(".b"):
            assert not parameter.any()


def test_only_what_is_added_requires_gradients_and_is_counted() -> None:
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64, **LLAMA)
    everything, base = sum(p.numel() for p in model.parameters()), set(dict(model.named_parameters()))
    apply_peft([model], KINDS["lora"], mesh=mesh, precision=FP64, seed=1)
    trained = {name for name, parameter, _ in named_specs(model) if parameter.requires_grad}
    assert trained == set(dict(model.named_parameters())) - base
    assert "decoder.layers.1.self_attention.linear_qkv.lora.q_proj.a" in trained
    # q, k, v, o, gate, up, down with 4 heads and 2 groups of 8, 48 inside
    pairs = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    expected = 2 * sum(2 * (i + o) for i, o in pairs)
    assert owned_parameters([model], mesh) == (expected, everything + expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_cover_every_parameter_once_and_ranks_together_count_it_once(
    kind: str, tp: int, sequence_parallel: bool
) -> None:
    """Ranks hold copies: of norms, of A or B, at TP 4 of keys and values; and rows that pad the vocabulary."""
    alone = single_process_mesh()
    model = tiny_model(alone, FP64, **LLAMA)
    base = sum(parameter.numel() for parameter in model.parameters())
    apply_peft([model], KINDS[kind], mesh=alone, precision=FP64, seed=1)
    everything = sum(parameter.numel() for parameter in model.parameters())
    trained = everything - base
    assert owned_parameters([model], alone) == (trained, everything)
    counts, specs = [], defaultdict(list)
    for rank in range(tp):
        mesh = data_mesh(Layout(tp=tp, sequence_parallel=sequence_parallel), rank)
        part = tiny_model(mesh, FP64, **LLAMA)
        apply_peft([part], KINDS[kind], mesh=mesh, precision=FP64, seed=1)
        counts.append(owned_parameters([part], mesh))
        for name, parameter, spec in named_specs(part):
            if parameter.requires_grad:
                specs[name].append((rank, spec))
    assert tuple(map(sum, zip(*counts, strict=True))) == (trained, everything)
    for by_rank in specs.values():
        assert_tiled(by_rank)


def test_a_prompt_starts_from_the_embeddings_of_its_text() -> None:
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64)
    plan = plan_adapter(replace(KINDS["prompt"], num_virtual_tokens=5), model.config, 131, mesh.world)
    plan.apply([model], mesh=mesh, precision=FP64, seed=1)
    pieces = [whole(*entry) for entry in named_specs(model)]
    plan.fill([model], pieces, prompt_tokens=[7, 130])
    table = model.embedding.word_embeddings.weight
    assert torch.equal(model.embedding.prompt.weight, table[[7, 130, 7, 130, 7]])
    with pytest.raises(UserError, match="--prompt-init-text"):
        plan.fill([model], pieces, prompt_tokens=[])


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_packed_documents_see_the_virtual_tokens_and_not_each_other(kind: str) -> None:
    """Two documents in a row give what each gives alone, at equal positions."""
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64, init_method_std=0.3, **LLAMA)
    apply_peft([model], KINDS[kind], mesh=mesh, precision=FP64, seed=1)
    tokens = tiny_tokens(1, 9)[:, :-1]
    virtual = model.sequence_length(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = Tokens.whole(positions, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32))
    together = model(tokens, packed)[virtual:]
    for part in (slice(0, 4), slice(4, 9)):
        alone = tokens[:, part]
        assert torch.allclose(together[part], model(alone, plain_tokens(alone))[virtual:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_a_kernel_without_masks_is_refused_by_name(kind: str) -> None:
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64)
    model.core.backend = AttentionBackend("varlen", (), "test")
    with pytest.raises(UserError, match=f"--peft {kind}.*--attention-backend unfused"):
        apply_peft([model], KINDS[kind], mesh=mesh, precision=FP64, seed=1)
    apply_peft([model], KINDS["lora"], mesh=mesh, precision=FP64, seed=1)


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_the_unfused_kernel_gives_the_same(kind: str) -> None:
    mesh, tokens = single_process_mesh(), tiny_tokens(2, 9)[:, :-1]
    results = []
    for backend in (None, UNFUSED):
        model = tiny_model(mesh, FP64, init_method_std=0.3, **LLAMA)
        if backend is not None:
            model.core = core_attention(tiny_build(**LLAMA), backend)
            for layer in model.decoder.layers.values():
                layer.self_attention.core = model.core
        apply_peft([model], KINDS[kind], mesh=mesh, precision=FP64, seed=1)
        results.append(model(tokens, plain_tokens(tokens)))
    assert torch.allclose(*results, rtol=0, atol=1e-12)


def test_a_frozen_weight_keeps_no_input_for_its_gradient() -> None:
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    weight = torch.nn.Parameter(torch.randn(5, 4))
    x = torch.randn(7, 2, 4, requires_grad=True)
    for trained, shapes in ((True, [(5, 4), (7, 2, 4)]), (False, [(5, 4)])):
        weight.requires_grad_(trained)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = linear(x, weight)
        assert kept == shapes
        y.sum().backward()
        assert torch.allclose(x.grad, weight.sum(0).expand_as(x))
        x.grad = None


def test_counted_tokens_are_counted_without_the_virtual_ones() -> None:
    mesh = single_process_mesh()
    model, text = tiny_model(mesh, FP64, **LLAMA), tiny_tokens(2, 9)
    apply_peft([model], KINDS["prompt"], mesh=mesh, precision=FP64, seed=1)
    tokens, labels = text[:, :-1], text[:, 1:]
    hidden = model(tokens, plain_tokens(tokens))
    chosen = torch.tensor([1, 4, 5, 17])  # of [s, b]
    expected = model.loss(hidden, labels).tokens.flatten()[chosen]
    assert torch.allclose(model.loss(hidden, labels, token_indices=chosen).tokens, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "flags", "device_type", "refused"),
    [
        ("prefix", {"sft_packing": True, "bf16": True}, "cuda", True),
        ("prompt", {"sft_packing": True, "bf16": True}, "cuda", True),
        ("lora", {"sft_packing": True, "bf16": True}, "cuda", False),
        ("prefix", {"attention_backend": "flash", "bf16": True}, "cuda", True),
        ("prompt", {"attention_backend": "flash", "bf16": True}, "cuda", False),
        ("prefix", {"attention_backend": "flash"}, "cpu", False),
        ("prefix", {"sft_packing": True}, "cpu", False),
    ],
)
def test_virtual_tokens_are_refused_with_kernels_that_take_no_mask(
    kind: str, flags: dict[str, Any], device_type: str, refused: bool
) -> None:
    config = set_fields(RunConfig(), attention_dropout=0.0, **flags)
    problem = backend_problem(choose_backend(config, device_type), kind, device_type)
    assert (problem is not None) == refused
