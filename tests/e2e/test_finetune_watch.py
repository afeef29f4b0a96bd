"""What is done at a fine-tuning run's validations, and its length in epochs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite.data.tokenizers import HuggingFaceTokenizer
from tests.data.chat_files import CONVERSATION, pairs, write_lines
from tests.e2e.runs import Outcome, evaluations, run, steps
from tests.e2e.test_finetune import COMMON, save_base

FLAGS = re.sub(r"--train-iters \d+ ", "", COMMON).replace("dropout 0.1", "dropout 0")
PROMPT = "Count to 3:"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=2)


def tune(flags: str, processes: int = 1) -> Outcome:
    return run(FLAGS + flags, processes, script="finetune")


def answers_in(outcome: Outcome) -> list[str]:
    return re.findall(r"prompt: [^\n]*\n  model: [^\n]*", outcome.out)


@pytest.mark.parametrize("samples, epochs, expected", [(20, 2, 5), (21, 2, 6)])
def test_epochs_are_so_many_steps_that_each_sample_is_read_at_least_so_often(
    base: Path, tmp_path: Path, samples: int, epochs: int, expected: int
) -> None:
    data = write_lines(tmp_path / "a.jsonl", pairs(samples))
    tune(
        f"--load-hf {base} --sft-data {data} --train-epochs {epochs} --lr-decay-style linear "
        f"--metrics-file {tmp_path}/m.jsonl"
    )
    taken = steps(tmp_path / "m.jsonl")
    assert len(taken) == expected == -(-samples * epochs // 8)
    assert taken[-1]["learning_rate"] == pytest.approx(1e-3 / expected)  # the rate decays over all of them


@pytest.mark.slow
def test_prompts_are_continued_as_transformers_does_in_every_layout(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, lines in (("pairs", pairs(12)), ("chats", [{"messages": CONVERSATION}] * 4)):
        data = write_lines(tmp_path / f"{name}.jsonl", lines)
        flags = (
            f"--load-hf {base} --sft-data {data} --sft-valid-data {data} --train-iters 1 --lr 0 --seq-length 128 "
            f"--eval-prompt '{PROMPT}' --eval-prompt 'def f' 'Once upon a time in'"
        )
        said = tune(flags)
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
        for text in (PROMPT, "def f", "Once upon a time in"):
            prompt = tokenizer(text)["input_ids"]
            if name == "chats":
                message = [{"role": "user", "content": text}]
                written = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
                prompt = written["input_ids"]
            ids = list(prompt)
            while len(ids) < len(prompt) + 64:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1, : len(tokenizer)].argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    break
            answer = HuggingFaceTokenizer(str(base)).detokenize(ids[len(prompt) :])
            answer = re.sub(r"\r\n?", "\n", answer)  # as the output was read
            assert f"prompt: {text}\n  model: {answer}\n" in said.out
    found = answers_in(said)
    assert len(found) == 3
    for layout, processes in (
        ("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4),
        ("--data-parallel-sharding-strategy optim_grads_params", 2),
    ):
        assert answers_in(tune(f"{flags} {layout}", processes)) == found


def test_the_best_adapter_is_that_of_the_lowest_validation_loss_whether_resumed_or_not(
    base: Path, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "a.jsonl", pairs(12))
    valid = write_lines(tmp_path / "v.jsonl", pairs(5))
    flags = (
        f"--load-hf {base} --sft-data {data} --sft-valid-data {valid} --train-iters 3 --lr 3e-1 --eval-interval 1 "
        "--peft lora --lora-rank 4 "
    )

    def places(name: str) -> str:
        where = tmp_path / name
        return f"--save {where} --load {where} --metrics-file {where}/m.jsonl --save-best-adapter {where}/best "

    straight = tune(flags + places("straight"))
    losses = [record["lm_loss"] for record in evaluations(tmp_path / "straight" / "m.jsonl")]
    best = losses.index(min(losses)) + 1
    assert 1 <= best < 3, losses  # so that a later, worse one is refused
    lowest = [n for n in range(3) if losses[n] < min(losses[:n], default=float("inf"))]
    assert straight.out.count("is the lowest so far") == len(lowest)
    for more in (f"--exit-interval {best}", ""):
        resumed = tune(flags + places("resumed") + more)
    assert "is the lowest so far" not in resumed.out
    tune(f"{flags} --save-adapter {tmp_path}/then --train-iters {best}")
    then, *others = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("then", "straight/best", "resumed/best")
    )
    for other in others:
        assert other.keys() == then.keys()
        assert all(torch.equal(other[name], then[name]) for name in then)
