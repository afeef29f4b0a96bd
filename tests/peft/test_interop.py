"""Adapters against PEFT: logits and tensors at any layout, gradients, and the work for a token."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.config.schema import OptimizerConfig
from megalite.config.schema_finetune import PeftConfig as OurConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import plain_tokens, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.peft.adapter import AdapterPlan, load_adapter, plan_adapter
from megalite.peft.convert import lora_name
from megalite.peft.files import peft_config
from tests.checkpoint.huggingface.folders import LATENT
from tests.models.hf_models import VOCABULARY, gpt2, llama_like
from tests.peft.interop import FP32, loud, make_and_save, our_logits, peft_logits, stages_of

LLAMA = {"num_key_value_heads": 2, "head_dim": 12}


def _model(kind: str) -> nn.Module:
    if kind == "GPT2":
        return gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    if kind == "DeepseekV3":
        return llama_like(kind, **LATENT, q_lora_rank=20)
    extra = {"num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5} if kind == "Glm" else LLAMA
    return llama_like(kind, **extra)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(1))


ours_to_peft: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"peft": "lora", "lora_rank": 3}),
    "llama, all, rslora": ("Llama", {"peft": "lora", "lora_target_modules": ["all-linear"], "use_rslora": True}),
    "llama, gate and up with one A": ("Llama", {"peft": "lora", "lora_target_modules": ["gate_up_proj", "o_proj"]}),
    "qwen3, values alone": ("Qwen3", {"peft": "lora", "lora_target_modules": ["v_proj"], "lora_alpha": 5}),
    "gpt2, all": ("GPT2", {"peft": "lora", "lora_target_modules": ["c_attn,c_proj,c_fc"], "lora_rank": 4}),
    "gpt2, queries and values, rslora": (
        "GPT2",
        {"peft": "lora", "lora_target_modules": ["q_proj,v_proj,up_proj"], "use_rslora": True},
    ),
    "glm, all": ("Glm", {"peft": "lora", "lora_target_modules": ["all-linear"]}),
    "glm, gate alone": ("Glm", {"peft": "lora", "lora_target_modules": ["gate_proj"]}),
    # PEFT takes the names of a DeepSeek's MLP for those of experts.
    "deepseek, attention": ("DeepseekV3", {"peft": "lora"}),
    "llama, prefix": ("Llama", {"peft": "prefix", "num_virtual_tokens": 5}),
    "llama, prefix from a network": ("Llama", {"peft": "prefix", "prefix_projection": True, "num_virtual_tokens": 5}),
    "gpt2, prefix": ("GPT2", {"peft": "prefix", "num_virtual_tokens": 3}),
    "llama, prompt": ("Llama", {"peft": "prompt", "num_virtual_tokens": 4}),
}


@pytest.mark.parametrize("case", ours_to_peft)
def test_an_adapter_saved_at_tp2_pp2_gives_equal_logits_in_peft(
    pool: ProcessPool, tmp_path: Path, tokens: Tensor, case: str
) -> None:
    kind, values = ours_to_peft[case]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = _model(kind)
    model.save_pretrained(base)
    pool.run(make_and_save, 4, str(base), values, str(adapter), layout=Layout(tp=2, pp=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of weights that were missing or left over
        warnings.simplefilter("ignore", FutureWarning)
        theirs = peft_logits(PeftModel.from_pretrained(model, str(adapter)).eval(), tokens)
    ours = our_logits(base, adapter, tokens)
    assert (ours - our_logits(base, None, tokens)).abs().max() > 0.05
    assert (ours - theirs).abs().max() <= 1e-4


def _peft_adapter(kind: str, config: Any, base: Path, adapter: Path) -> nn.Module:
    model = _model(kind)
    model.save_pretrained(base)
    adapted = get_peft_model(model, config)
    loud(adapted)
    adapted.save_pretrained(str(adapter))
    result: nn.Module = adapted.eval()
    return result


LORA = {"task_type": "CAUSAL_LM"}
peft_to_ours: dict[str, tuple[str, PeftConfig]] = {
    "lora": ("Llama", LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "k_proj", "down_proj"], **LORA)),
    "rslora": ("Qwen2", LoraConfig(r=4, use_rslora=True, target_modules="all-linear", **LORA)),
    "lora on gpt2": ("GPT2", LoraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"], **LORA)),
    "lora on glm": ("Glm", LoraConfig(r=4, target_modules="all-linear", **LORA)),
    "lora on deepseek": ("DeepseekV3", LoraConfig(r=4, target_modules=["q_b_proj", "kv_a_proj_with_mqa"], **LORA)),
    "ranks by pattern": (
        "Llama",
        LoraConfig(
            r=4,
            target_modules=["q_proj", "mlp.up_proj"],
            rank_pattern={"q_proj": 2},
            alpha_pattern={"up_proj": 3},
            **LORA,
        ),
    ),
    "prefix": ("Llama", PrefixTuningConfig(num_virtual_tokens=5, **LORA)),
    "prefix from a network": (
        "Llama",
        PrefixTuningConfig(num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=7, **LORA),
    ),
    "prompt": ("GPT2", PromptTuningConfig(num_virtual_tokens=6, **LORA)),
}


@pytest.mark.parametrize("case", peft_to_ours)
def test_an_adapter_of_peft_gives_equal_logits_here_and_comes_back_bitwise(
    pool: ProcessPool, tmp_path: Path, tokens: Tensor, case: str
) -> None:
    base, adapter, back = tmp_path / "base", tmp_path / "adapter", tmp_path / "back"
    model = _peft_adapter(*peft_to_ours[case], base, adapter)
    ours, theirs = our_logits(base, adapter, tokens), peft_logits(model, tokens)
    assert (ours - our_logits(base, None, tokens)).abs().max() > 0.05
    assert (ours - theirs).abs().max() <= 1e-4
    pool.run(make_and_save, 4, str(base), {"load_adapter": str(adapter)}, str(back), layout=Layout(tp=2, pp=2))
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    written = json.loads((back / "adapter_config.json").read_text())
    assert written["peft_type"] == json.loads((adapter / "adapter_config.json").read_text())["peft_type"]


# ---------------------------------------------------------------------------------------------------------- gradients


def _our_gradients(base: Path, adapter: Path, tokens: Tensor, labels: Tensor, *, sinks: bool) -> dict[str, Tensor]:
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
        assert sinks == (parameter.grad is None)
        gradients[name] = gradient
    return gradients


def _their_gradients(base: Path, adapter: Path, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """By our global name, in PEFT's shape. Writes the model and the adapter, whose scale is 10 / 4 and whose B isn't
    zero, since A's gradient would be."""
    plain = llama_like("Llama", num_key_value_heads=2, head_dim=12)
    plain.save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    loud(model, 0.1)
    model.save_pretrained(str(adapter))
    model.eval()
    F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    gradients: dict[str, Tensor] = {}
    ours = read_huggingface_config(base).model
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            words = name.split(".")  # ... layers.1.self_attn.q_proj.lora_A.default.weight
            matrix = next(word for word in words if word in ("lora_A", "lora_B"))
            layer, part = int(words[words.index("layers") + 1]), words[words.index(matrix) - 1]
            gradients[lora_name(layer, part, matrix[-1].lower(), ours)] = parameter.grad
    return gradients


@pytest.mark.parametrize("sinks", [True, False], ids=["into the optimizer's buckets", "returned to autograd"])
def test_every_gradient_of_lora_is_that_of_peft(tmp_path: Path, sinks: bool) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    text = torch.randint(131, (2, 13), generator=torch.Generator().manual_seed(1))
    tokens, labels = text[:, :-1], text[:, 1:]
    theirs = _their_gradients(base, adapter, tokens, labels)
    ours = _our_gradients(base, adapter, tokens, labels, sinks=sinks)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 7 * 2  # layers, linear layers, A and B
    for name, expected in theirs.items():
        largest = expected.abs().max().item()
        assert largest > 0, name
        assert (ours[name].reshape(expected.shape) - expected).abs().max().item() <= 1e-5 * largest, name


# --------------------------------------------------------------------------------------------------------------- work

WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, all": ("Llama", {"r": 3, "target_modules": "all-linear"}),
    "llama, some": ("Llama", {"r": 5, "target_modules": ["k_proj", "down_proj"]}),
    "llama, ranks by pattern": (
        "Llama",
        {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 2}},
    ),
    "gpt2, fused": ("GPT2", {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


def _forward_flops(model: nn.Module, tokens: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    return counter.get_total_flops()


def _plan(peft: OurConfig, base: Path) -> AdapterPlan:
    return plan_adapter(peft, read_huggingface_config(str(base)).model, VOCABULARY, single_process_mesh().world)


@pytest.mark.parametrize("case", WORK)
def test_lora_multiplies_a_token_by_as_many_weights_as_in_peft(tmp_path: Path, case: str) -> None:
    kind, values = WORK[case]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = gpt2() if kind == "GPT2" else llama_like(kind, num_key_value_heads=2, head_dim=12)
    model.save_pretrained(base)
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    before = _forward_flops(model, tokens)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **values)).eval()
    adapted.save_pretrained(str(adapter))
    plan = _plan(peft_config(adapter), base)
    for head in (False, True):
        work = plan.work(head=head)
        assert 2 * tokens.numel() * work.matmul == _forward_flops(adapted, tokens) - before > 0
        assert (work.head, work.virtual_tokens) == (head, 0)


def test_a_prompts_tokens_are_computed_and_a_prefix_is_only_attended_to(tmp_path: Path) -> None:
    llama_like("Llama").save_pretrained(tmp_path)
    for kind in ("prompt", "prefix"):
        plan = _plan(OurConfig(peft=kind, num_virtual_tokens=6), tmp_path)
        work = plan.work(head=False)
        assert (work.matmul, work.virtual_tokens, work.computed) == (0, 6, kind == "prompt")
