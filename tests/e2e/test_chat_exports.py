"""A model tuned on chats, judged by use: exported, merged and as an adapter it answers and stops in `transformers` as
in `tools/generate.py`, and `transformers` writes conversations as training did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.data.chat_template import load_chat
from megalite.data.tokenizers import HuggingFaceTokenizer
from megalite.peft.merge import merge_adapter
from tests.checkpoint.logical import found as found_in
from tests.data.chat_files import CHATML_TEMPLATE, GENERATION_TEMPLATE, SPECIAL, chat_tokenizer, write_lines
from tests.e2e.runs import ROOT, run
from tests.helpers import load_tool
from tests.models import hf_models

ROWS, LIMIT = 419, 24
ANSWERS = {"hi": "hello", "1 + 1": "2, of course", "今天": "很好"}
END = SPECIAL.index("<|endoftext|>")
TURN = SPECIAL.index("<|im_end|>")
COMMON = (
    "--seq-length 64 --micro-batch-size 3 --global-batch-size 3 --lr-decay-style constant --eval-iters 0 "
    "--log-interval 50 --device cpu --threads-per-rank 1 --num-workers 0 --seed 3 "
)
FULL = "--train-iters 50 --lr 5e-3 --clip-grad 1.0 "
LORA = "--train-iters 80 --lr 5e-3 --peft lora --lora-target-modules all-linear "


def base_model(folder: Path, kind: str, template: str | None) -> Path:
    """A random model whose texts end with <|endoftext|>, and a tokenizer to which <|im_end|> is a token like others."""
    fields = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "eos_token_id": END}
    model: Any = hf_models.llama_like(kind, vocab_size=ROWS, **fields)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # it stays frozen beside an adapter, and must be able to be sure
    model.save_pretrained(folder)
    return chat_tokenizer(folder, template=template, eos_token="<|endoftext|>", pad_token=None)


def chats(file: Path) -> str:
    return write_lines(
        file,
        (
            {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}
            for said, answer in ANSWERS.items()
        ),
    )


def ours(capsys: pytest.CaptureFixture[str], *where: object) -> Iterator[list[int]]:
    """What `generate.py --chat` answers, as ids without the end."""
    prompts = [word for said in ANSWERS for word in ("--prompt", said)]
    words = [*map(str, where), "--chat", *prompts, "--max-new-tokens", str(LIMIT), "--json", "--device", "cpu"]
    capsys.readouterr()
    assert load_tool(ROOT / "tools" / "generate.py").main(words) == 0
    return (json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines())


def theirs(model: Any, folder: Path) -> Iterator[list[int]]:
    """What transformers answers with the tokenizer and the template in `folder`, as ids with the end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for said in ANSWERS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        result = model.eval().generate(**prompt, max_new_tokens=LIMIT, do_sample=False)
        yield result[0, prompt["input_ids"].shape[1] :].tolist()


def assert_answers(found: list[list[int]], transformers: list[list[int]], tokenizer: HuggingFaceTokenizer) -> None:
    assert [ids[:-1] for ids in transformers] == found
    assert {ids[-1] for ids in transformers} == {TURN}
    assert [tokenizer.detokenize(ids) for ids in found] == list(ANSWERS.values())


def assert_writes_what_was_trained(folder: Path, template: str | None, base: Path) -> None:
    """Of conversations, prompts included."""
    from transformers import AutoTokenizer

    chat = load_chat(template, HuggingFaceTokenizer(str(base)), str(base))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello <b>&"}] * 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = chat.ids(chat.template.segments(messages))
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids[: len(trained)] == trained
    assert tokenizer.decode(ids[len(trained) :]).strip() == ""
    ids = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert ids == chat.prompt(messages[:3])


@pytest.mark.parametrize(
    ("kind", "own", "given"),
    [
        ("Qwen2", None, "chatml"),
        pytest.param("Llama", CHATML_TEMPLATE, None, marks=pytest.mark.slow),
        pytest.param("Qwen3", None, GENERATION_TEMPLATE, marks=pytest.mark.slow),
        pytest.param("Glm", None, "chatml", marks=pytest.mark.slow),
    ],
)
def test_a_tuned_model_answers_and_stops_in_transformers_as_here(
    kind: str, own: str | None, given: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GenerationConfig

    base, exported, merged = (tmp_path / name for name in ("base", "exported", "merged"))
    full, adapter = tmp_path / "full", tmp_path / "adapter"
    base_model(base, kind, own)
    if given is not None and given != "chatml":
        (tmp_path / "template.jinja").write_text(given, "utf-8")
        given = str(tmp_path / "template.jinja")
    flags = f"{COMMON} --load-hf {base} --sft-data {chats(tmp_path / 'chats.jsonl')} "
    flags += "" if given is None else f"--chat-template {given} "
    run(f"{flags} {FULL} --save {full}", script="finetune")
    run(f"{flags} {LORA} --save-adapter {adapter}", script="finetune")
    megalite_to_huggingface(found_in(full), exported)
    merge_adapter(base, adapter, merged)
    tokenizer = HuggingFaceTokenizer(str(base))

    for folder in (exported, merged):
        values = [json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")]
        assert [one["eos_token_id"] for one in values] == [[END, TURN]] * 2
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert_answers([*ours(capsys, "--load-hf", folder)], [*theirs(model, folder)], tokenizer)
        assert_writes_what_was_trained(folder, given, base)
    assert [*ours(capsys, "--load", full)] == [*ours(capsys, "--load-hf", exported)]

    beside: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    beside.generation_config = GenerationConfig.from_pretrained(adapter)
    found = [*ours(capsys, "--load-hf", base, "--adapter", adapter)]
    assert_answers(found, [*theirs(beside, adapter)], tokenizer)
    assert_writes_what_was_trained(adapter, given, base)
