"""Adapters between megalite at any layout and PEFT: logits and tensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from megalite.distributed.layout import Layout
from megalite.distributed.pool import ProcessPool
from tests.models.hf_models import gpt2, llama_like
from tests.peft.interop import loud, make_and_save, our_logits, peft_logits

LLAMA = {"num_key_value_heads": 2, "head_dim": 12}


def _model(kind: str) -> nn.Module:
    if kind == "GPT2":
        return gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    extra = {"num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5} if kind == "Glm" else LLAMA
    return llama_like(kind, **extra)


@pytest.fixture
def tokens() -> torch.Tensor:
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
    "llama, prefix": ("Llama", {"peft": "prefix", "num_virtual_tokens": 5}),
    "llama, prefix from a network": ("Llama", {"peft": "prefix", "prefix_projection": True, "num_virtual_tokens": 5}),
    "gpt2, prefix": ("GPT2", {"peft": "prefix", "num_virtual_tokens": 3}),
    "llama, prompt": ("Llama", {"peft": "prompt", "num_virtual_tokens": 4}),
}


@pytest.mark.parametrize("case", ours_to_peft)
def test_an_adapter_saved_at_tp2_pp2_gives_equal_logits_in_peft(
    pool: ProcessPool, tmp_path: Path, tokens: torch.Tensor, case: str
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


def _peft_adapter(kind: str, peft_config: Any, base: Path, adapter: Path) -> nn.Module:
    model = _model(kind)
    model.save_pretrained(base)
    adapted = get_peft_model(model, peft_config)
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
    pool: ProcessPool, tmp_path: Path, tokens: torch.Tensor, case: str
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
