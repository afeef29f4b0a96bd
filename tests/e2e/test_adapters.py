"""An adapter's whole life through the commands that users type: train, stop, resume, save, merge, generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.data.chat_files import pairs, write_lines
from tests.e2e.runs import ROOT, program, run, written
from tests.e2e.test_finetune import COMMON, save_base
from tests.helpers import load_tool

SCRIPT = ROOT / "finetune.py"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=2)


def tool(capsys: pytest.CaptureFixture[str], name: str, *words: object) -> str:
    """Standard output of a tool, called in this process."""
    assert load_tool(ROOT / "tools" / name).main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24).view(2, 12)).logits
    return found


@pytest.mark.slow
def test_a_lora_is_trained_resumed_saved_merged_and_used(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    data = write_lines(tmp_path / "sft.jsonl", pairs(12))
    flags = (
        f"{COMMON.replace('--fp64', '')} --load-hf {base} --sft-data {data} --peft lora --lora-rank 4 --train-iters 4 "
        f"--lora-dropout 0.1 --eval-iters 0 --lr 2e-2 {TP2}"
    )

    def places(name: str) -> str:
        where = tmp_path / name
        return f" --save {where} --load {where} --metrics-file {where}/m.jsonl --save-adapter {where}/adapter"

    run(flags + places("straight"), 2, script="finetune")
    run(flags + places("resumed") + " --exit-interval 2", 2, script="finetune")
    outcome = program(flags + places("resumed"), 2, script=SCRIPT)
    assert "iteration 2" in outcome.out
    straight, resumed = (written(tmp_path / name / "m.jsonl") for name in ("straight", "resumed"))
    assert straight == resumed
    assert len(straight) == 4
    adapter, merged = tmp_path / "resumed" / "adapter", tmp_path / "merged"
    weights = "adapter_model.safetensors"
    assert (adapter / weights).read_bytes() == (tmp_path / "straight" / "adapter" / weights).read_bytes()
    tool(capsys, "merge_adapter.py", "--load-hf", base, "--adapter", adapter, "--hf", merged)
    plain, whole = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (base, merged))
    before = logits(plain)
    beside = logits(PeftModel.from_pretrained(plain, str(adapter)))
    assert (beside - before).abs().max() > 1e-2
    assert (beside - logits(whole)).abs().max() <= 1e-5
    words = ("--prompt", "Count to 3:", "--max-new-tokens", 5, "--device", "cpu", "--json")
    said = [
        json.loads(tool(capsys, "generate.py", *where, *words))
        for where in (("--load-hf", base, "--adapter", adapter), ("--load-hf", merged))
    ]
    assert said[0] == said[1]
    assert said[0].keys() == {"prompt", "text", "tokens"}
