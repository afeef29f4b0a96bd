"""A real model, SmolLM2-135M-Instruct: its logits and greedy continuations in every layout, and LoRA on it.

Runs with `-m smollm2`: the model is a download of 90 MB. MEGALITE_SMOLLM2 may name a folder made by
`examples/smollm2.py`; else it is made anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import plain_tokens
from tests.e2e.runs import ROOT
from tests.peft.interop import stages_of

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a small dog who",
    "Water boils at",
    "The three laws of motion say that",
]
NEW = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("MEGALITE_SMOLLM2")
    if given is not None:
        return given
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, str(ROOT / "examples" / "smollm2.py"), str(folder)], check=True)
    return str(folder)


@cache
def transformers_says(folder: str) -> list[tuple[Tensor, Tensor, int]]:
    """Of each prompt: its tokens with the greedy continuation [1, s], logits at them [s, vocabulary], prompt length."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # all 64 tokens of each
    result = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            mask = torch.ones_like(ids)
            tokens = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
            result.append((tokens, model(tokens).logits[0], ids.shape[1]))
    return result


@torch.no_grad()
def local_logits(mesh: Mesh, folder: str, texts: list[Tensor]) -> list[Tensor] | None:
    """This rank's columns [s, columns] of the logits at each text, on the last stage."""
    (stage,) = stages_of(folder, mesh)
    results = []
    for tokens in texts:
        x = tokens
        if mesh.pp.rank:
            x = torch.empty(tokens.shape[1], 1, stage.config.hidden_size or 0)
            dist.recv(x, group=mesh.pp.process_group, group_src=mesh.pp.rank - 1)
        x = stage(x, plain_tokens(tokens))
        if mesh.pp.rank < mesh.pp.size - 1:
            dist.send(x.contiguous(), group=mesh.pp.process_group, group_dst=mesh.pp.rank + 1)
        else:
            results.append(stage.logits(x)[:, 0])
    return results or None


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3), Layout(pp=2)], ids=["TP 1", "TP 3", "PP 2"])
def test_logits_and_greedy_continuations_are_transformers(pool: ProcessPool, model: str, layout: Layout) -> None:
    truth = transformers_says(model)
    texts = [tokens for tokens, _, _ in truth]
    answers = pool.run(local_logits, layout.world_size, model, texts, layout=layout, timeout=600)
    parts = [answer for answer in answers if answer is not None]
    apart = 0.0
    for number, (tokens, expected, length) in enumerate(truth):
        logits = torch.cat([part[number] for part in parts], dim=-1)
        apart = max(apart, (logits - expected).abs().max().item())
        # Each next token is the best one after those before it, so the whole continuation is the greedy one.
        assert torch.equal(logits[length - 1 : -1].argmax(dim=-1), tokens[0, length:])
    print(f"largest difference of logits: {apart:.2e}")
    assert apart <= 1e-3


def answers_in_form(folder: Path, model: str, adapter: list[str]) -> float:
    """Share of the held-out questions whose answer has the form that was taught."""
    lines = [json.loads(line) for line in (folder / "valid.jsonl").read_text("utf-8").splitlines()]
    questions = [line["messages"][0]["content"] for line in lines]
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), "--load-hf", model, *adapter, "--chat", "--json"]
    for question in questions:
        command += ["--prompt", question]
    done = subprocess.run([*command, "--max-new-tokens", "24"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    right = 0
    for line, question in zip(done.stdout.splitlines(), questions, strict=True):
        numbers = ", ".join(re.findall(r"\d+", question))
        right += re.fullmatch(rf"SUM\({numbers}\) = \d+\. Over\.", json.loads(line)["text"].strip()) is not None
    return right / len(questions)


def test_lora_teaches_a_form_of_answers_from_the_command_line(model: str, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    environment = {**os.environ, "PYTHON": sys.executable}
    script = ["sh", "examples/finetune_lora.sh", str(tmp_path)]
    done = subprocess.run(script, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    assert "SUM(12, 30) = 42. Over." in done.stdout
    before = answers_in_form(tmp_path, model, [])
    after = answers_in_form(tmp_path, model, ["--adapter", str(tmp_path / "adapter")])
    print(f"answers in form: {before:.0%} before, {after:.0%} after")
    assert before < 0.1
    assert after > 0.9
