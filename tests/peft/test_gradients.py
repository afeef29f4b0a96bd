"""LoRA's gradients against those that PEFT's autograd finds on the same model and adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import plain_tokens, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.peft.adapter import load_adapter
from megalite.peft.convert import lora_name
from tests.models.hf_models import llama_like
from tests.peft.interop import FP32, stages_of


def _ours(base: Path, adapter: Path, tokens: Tensor, labels: Tensor, *, sinks: bool) -> dict[str, Tensor]:
    """By global name, as the optimizer's buckets have them or as autograd returns them."""
    mesh = single_process_mesh()
    (model,) = stages_of(str(base), mesh)
    load_adapter(model, str(adapter), mesh=mesh, precision=FP32)
    trained = {name: parameter for name, parameter, _ in named_specs(model) if ".lora." in name}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    if sinks:
        Optimizer(units_of([model]), mesh, FP32, OptimizerConfig()).begin_step(1)
    model.loss(model(tokens, plain_tokens(tokens)), labels, scale=1 / labels.numel()).total.backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        gradient = parameter.gradient_sink.target() if sinks else parameter.grad  # type: ignore[attr-defined]
        assert gradient is not None
        assert sinks == (parameter.grad is None)
        gradients[name] = gradient
    return gradients


def _theirs(base: Path, adapter: Path, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """By our global name, in PEFT's shape. Writes the model and the adapter, whose scale is 10 / 4 and whose B isn't
    zero, since A's gradient would be."""
    from peft import LoraConfig, get_peft_model

    plain = llama_like("Llama", num_key_value_heads=2, head_dim=12)
    plain.save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(adapter))
    model.eval()
    F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            words = name.split(".")  # ... layers.1.self_attn.q_proj.lora_A.default.weight
            matrix = next(word for word in words if word in ("lora_A", "lora_B"))
            layer, part = int(words[words.index("layers") + 1]), words[words.index(matrix) - 1]
            assert parameter.grad is not None
            gradients[lora_name(layer, part, matrix[-1].lower())] = parameter.grad
    return gradients


@pytest.mark.parametrize("sinks", [True, False], ids=["into the optimizer's buckets", "returned to autograd"])
def test_every_gradient_of_lora_is_that_of_peft(tmp_path: Path, sinks: bool) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    text = torch.randint(131, (2, 13), generator=torch.Generator().manual_seed(1))
    tokens, labels = text[:, :-1], text[:, 1:]
    theirs = _theirs(base, adapter, tokens, labels)
    ours = _ours(base, adapter, tokens, labels, sinks=sinks)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 7 * 2  # layers, linear layers, A and B
    for name, expected in theirs.items():
        largest = expected.abs().max().item()
        assert largest > 0, name
        assert (ours[name].reshape(expected.shape) - expected).abs().max().item() <= 1e-5 * largest, name
