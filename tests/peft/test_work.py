"""What an adapter adds to the work for a token, against the FLOPs that torch counts in PEFT's forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.peft.adapter import AdapterPlan, plan_adapter
from megalite.peft.files import peft_config
from tests.models.hf_models import VOCABULARY, gpt2, llama_like

CASES: dict[str, tuple[str, dict[str, Any]]] = {
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


def _plan(peft: PeftConfig, base: Path) -> AdapterPlan:
    return plan_adapter(peft, read_huggingface_config(str(base)).model, VOCABULARY, single_process_mesh().world)


@pytest.mark.parametrize("case", CASES)
def test_lora_multiplies_a_token_by_as_many_weights_as_in_peft(tmp_path: Path, case: str) -> None:
    from peft import LoraConfig, get_peft_model

    kind, values = CASES[case]
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
        plan = _plan(PeftConfig(peft=kind, num_virtual_tokens=6), tmp_path)
        work = plan.work(head=False)
        assert (work.matmul, work.virtual_tokens, work.computed) == (0, 6, kind == "prompt")
