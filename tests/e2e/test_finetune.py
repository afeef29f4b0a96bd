"""finetune.py: starts from a Hugging Face folder, learns answers or labels, and computes the same in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.config.fields import section_names
from megalite.data.packing import TokenSequences
from megalite.data.sft import SftOptions, SftReader
from megalite.data.tokenizers import HuggingFaceTokenizer
from megalite.distributed.launch import Environment
from megalite.peft.merge import merge_adapter
from megalite.training.prepare import prepare
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found as found_in
from tests.data.chat_files import chat_tokenizer, pairs, write_lines
from tests.e2e import runs
from tests.e2e.runs import (
    TOLERANCE,
    Outcome,
    assert_equal,
    checkpoint,
    checkpoint_tensors,
    evaluations,
    outputs,
    run,
    steps,
    written,
)
from tests.models import hf_models

ROWS = 431  # of the model's vocabulary: a prime, and more than the tokenizer has ids
COMMON = (
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --lr-decay-style constant "
    "--fp64 --device cpu --threads-per-rank 1 --log-interval 1 --num-workers 0 --make-vocab-size-divisible-by 1 "
    "--eval-iters 3 --hidden-dropout 0.1 --attention-dropout 0.1 "
)
CUT = "--sft-long-answers truncate"
SEQUENCE_AND_PIPELINE = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": "say " + "a " * n},
            {"role": "assistant", "content": f"{n} times a"},
            {"role": "user", "content": "once more"},
            {"role": "assistant", "content": "a " * (n % 3 + 1)},
        ]
    }
    for n in range(1, 11)
]
TEXTS = [
    {"text": f"number {n} is " + "very " * (n % 7) + ("odd" if n % 2 else "even"), "label": n % 2} for n in range(50)
]


def save_base(folder: Path, **fields: Any) -> Path:
    """A random Llama and a trained tokenizer with a chat template."""
    values = {"num_key_value_heads": 2, "vocab_size": ROWS, "num_hidden_layers": 4, "max_position_embeddings": 128}
    model = hf_models.llama_like("Llama", **(values | fields)).double()
    model.save_pretrained(folder)  # type: ignore[operator]
    return chat_tokenizer(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("data") / "sft.jsonl", [*pairs(30), *CONVERSATIONS])


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("data") / "labels.jsonl", TEXTS)


def tune(flags: str, processes: int = 1, **how: Any) -> Outcome:
    return run(COMMON + flags, processes, script="finetune", **how)


def loss_of(path: Path) -> float:
    (record,) = evaluations(path)
    loss: float = record["lm_loss"]
    return loss


@pytest.fixture(scope="module")
def sft_reference(base: Path, answers: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tune(f"--load-hf {base} --sft-data {answers} {CUT} --sft-valid-share 0.2 {outputs(folder)}")
    return folder


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(SEQUENCE_AND_PIPELINE, 4, id="tp2, sequence parallel, pp2", marks=pytest.mark.slow),
        pytest.param("--data-parallel-sharding-strategy optim_grads_params", 2, id="zero 3"),
    ],
)
def test_samples_of_all_lengths_train_alike_in_every_layout(
    flags: str, processes: int, base: Path, answers: str, sft_reference: Path, tmp_path: Path
) -> None:
    data = f"--load-hf {base} --sft-data {answers} {CUT} --sft-valid-share 0.2"
    tune(f"{data} {flags} {outputs(tmp_path)}", processes)
    assert_equal(tmp_path, sft_reference)
    ours, theirs = (loss_of(folder / "metrics.jsonl") for folder in (tmp_path, sft_reference))
    assert abs(ours - theirs) <= TOLERANCE * theirs


def sequences_of(base: Path, answers: str) -> TokenSequences:
    options = SftOptions(data=[answers], seq_length=64, seed=1234, long_answers="truncate")
    return SftReader(options, HuggingFaceTokenizer(str(base)), str(base)).read([answers], "--sft-data")


def test_the_loss_is_that_of_transformers_over_the_answers_padded_or_packed(
    base: Path, answers: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    data = sequences_of(base, answers)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    total = 0.0
    for begin, end in zip(data.begins[:-1], data.begins[1:], strict=True):
        tokens = torch.tensor(data.tokens[begin:end], dtype=torch.int64)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        total += float(losses[torch.tensor(data.counted[begin + 1 : end])].sum())
    expected = total / data.counted.sum()
    found = []
    for packing in ("", "--sft-packing"):
        path = tmp_path / f"m{len(packing)}.jsonl"
        sets = f"--sft-data {answers} {CUT} --sft-valid-data {answers} {packing} --skip-train --full-validation"
        tune(f"--load-hf {base} {sets} --metrics-file {path}")
        found.append(loss_of(path))
    assert abs(found[0] - found[1]) <= TOLERANCE * found[1]
    assert found[0] == pytest.approx(expected, rel=1e-6)  # transformers rounds norms and rotation to fp32


def test_tokens_are_counted_as_they_are_processed(base: Path, answers: str, tmp_path: Path) -> None:
    """With one sample a microbatch there is no padding."""
    path = tmp_path / "m.jsonl"
    sets = f"--load-hf {base} --sft-data {answers} {CUT} --eval-iters 0"
    tune(f"{sets} --micro-batch-size 1 --train-iters 5 --lr 0 --metrics-file {path}")
    data = sequences_of(base, answers)
    assert steps(path)[-1]["consumed_samples"] == len(data) == 40
    assert steps(path)[-1]["consumed_tokens"] == (data.lengths - 1).sum()


def test_resuming_changes_nothing_and_wins_over_the_base_model(base: Path, answers: str, tmp_path: Path) -> None:
    names = ("lm_loss", "grad_norm", "consumed_tokens")
    flags = f"--load-hf {base} --sft-data {answers} {CUT} --sft-packing --eval-iters 0 --train-iters 2"
    for folder, more in (("straight", [""]), ("resumed", ["--exit-interval 1", ""])):
        path = tmp_path / folder
        for words in more:
            tune(f"{flags} --save {path} --load {path} --metrics-file {path}/m.jsonl {words}")
    straight, resumed = (written(tmp_path / folder / "m.jsonl", *names) for folder in ("straight", "resumed"))
    assert straight == resumed
    assert len(straight) == 2


def test_a_step_without_learning_leaves_the_base_model_as_it_was_in_half_precision(
    base: Path, answers: str, tmp_path: Path
) -> None:
    """Main parameters are those that were loaded, not those of the start."""
    flags = f"--load-hf {base} --sft-data {answers} {CUT} --eval-iters 0 --train-iters 1 --lr 0 --save {tmp_path}"
    run(f"{COMMON.replace('--fp64', '--bf16')} {flags} --use-distributed-optimizer", 2, script="finetune")
    found = checkpoint_tensors(checkpoint(tmp_path, 1))
    names = {"embedding.word_embeddings.weight": "embed_tokens.weight", "decoder.final_layernorm.weight": "norm.weight"}
    stored = load_file(base / "model.safetensors")
    for ours, theirs in names.items():
        expected = stored[f"model.{theirs}"].to(torch.bfloat16)
        assert torch.equal(found[f"model.{ours}"], expected)
        assert torch.equal(found[f"optimizer.main.{ours}"], expected.to(torch.float32))


@pytest.mark.slow
def test_a_classifier_learns_and_is_judged_alike_in_every_layout(base: Path, labels: str, tmp_path: Path) -> None:
    data = f"--load-hf {base} --task classification --sft-data {labels} --sft-valid-share 0.3 "
    data += "--lr 3e-3 --train-iters 10 --save "
    judged = {}
    for name, layout, processes in (("one", "", 1), ("four", SEQUENCE_AND_PIPELINE, 4)):
        tune(f"{data} {tmp_path / name} {layout} {outputs(tmp_path / name)}", processes)
        (judged[name],) = evaluations(tmp_path / name / "metrics.jsonl")
    assert_equal(tmp_path / "four", tmp_path / "one")
    assert judged["four"]["accuracy"] == judged["one"]["accuracy"] > 0.9
    assert judged["four"]["macro_f1"] == judged["one"]["macro_f1"] > 0.9
    folder = checkpoint(tmp_path / "one", 10)
    assert checkpoint_tensors(folder)["model.classifier.weight"].shape == (2, hf_models.HIDDEN)
    assert json.loads((folder / "config.json").read_text())["finetune"]["class_names"] == ["0", "1"]
    names = f"{data} {tmp_path / 'other'} --load {tmp_path / 'one'} --class-names 1 0"
    assert "was trained with --class-names 0 1" in tune(names, check=False).err
    megalite_to_huggingface(found_in(tmp_path / "one"), tmp_path / "hf")
    sets = f"--load-hf {tmp_path / 'hf'} --task classification --sft-data {labels} --sft-valid-share 0.3 --skip-train"
    for name, flags, processes in (("again", "", 1), ("cut", SEQUENCE_AND_PIPELINE, 4), ("lora", "--peft lora", 1)):
        tune(f"{sets} {flags} --metrics-file {tmp_path / name}.jsonl", processes)
        (found,) = evaluations(tmp_path / f"{name}.jsonl")
        assert found["accuracy"] == judged["one"]["accuracy"], name
        assert abs(found["lm_loss"] - judged["one"]["lm_loss"]) <= TOLERANCE * judged["one"]["lm_loss"], name


def test_a_classifiers_adapter_merges_into_a_model_that_is_judged_alike(
    base: Path, labels: str, tmp_path: Path
) -> None:
    adapter, merged, board = (tmp_path / name for name in ("adapter", "merged", "board"))
    data = f"--task classification --sft-data {labels} --sft-valid-share 0.3 --class-names 1 0"
    lora = f"--peft lora --save-adapter {adapter} --lr 3e-3 --tensorboard-dir {board}"
    outcome = tune(f"--load-hf {base} {data} {lora} --metrics-file {tmp_path}/trained.jsonl")
    (trained,) = evaluations(tmp_path / "trained.jsonl")
    lines = merge_adapter(base, adapter, merged)
    assert lines[1:] == ["a classifier: 1, 0"]
    again = tune(f"--load-hf {merged} {data} --skip-train --metrics-file {tmp_path}/merged.jsonl")
    (found,) = evaluations(tmp_path / "merged.jsonl")
    assert found["accuracy"] == trained["accuracy"] > 0.6
    assert abs(found["lm_loss"] - trained["lm_loss"]) <= TOLERANCE * trained["lm_loss"]
    # A loss of classes has no perplexity.
    assert set(found) == {"iteration", "split", "lm_loss", "accuracy", "macro_f1"}
    assert "PPL" not in outcome.out + again.out
    events = EventAccumulator(str(board))
    events.Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if tag.endswith("validation") or "ppl" in tag}
    assert scalars == {"lm loss validation", "accuracy validation", "macro_f1 validation"}


def test_a_classifier_of_another_number_of_classes_is_refused(labels: str, tmp_path: Path) -> None:
    names = ("LABEL_0", "LABEL_1", "LABEL_2")
    source = folders.save_classifier("llama, grouped, tied", tmp_path / "hf", names, vocab_size=ROWS)
    chat_tokenizer(source)
    outcome = tune(f"--load-hf {source} --task classification --sft-data {labels}", check=False)
    assert outcome.code == 1
    assert "has 3 classes (LABEL_0, LABEL_1, LABEL_2), but --sft-data has 2: 0, 1" in outcome.err


# ---------------------------------------------------------------------------------------------------- bad input


def refusal(flags: str) -> str:
    return runs.refusal(COMMON + flags, sections=section_names())


def test_a_tokenizer_without_template_or_end_is_refused_before_processes_meet(answers: str, tmp_path: Path) -> None:
    folder = save_base(tmp_path / "hf")
    chats = write_lines(tmp_path / "chats.jsonl", CONVERSATIONS)
    chat_tokenizer(folder, template=None)
    assert "has no chat template" in refusal(f"--load-hf {folder} --sft-data {chats}")
    argv = f"{COMMON} --load-hf {folder} --sft-data {chats} --chat-template chatml".split()
    prepare(argv, Environment(), program="finetune.py", description="", sections=section_names())
    chat_tokenizer(folder, eos_token=None, pad_token=None)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text("utf-8").replace("<|endoftext|>", "<|other|>"), encoding="utf-8")
    assert "end-of-document" in refusal(f"--load-hf {folder} --sft-data {answers} {CUT}")


def test_flags_that_contradict_the_base_model_are_refused(base: Path, answers: str, tmp_path: Path) -> None:
    data = f"--load-hf {base} --sft-data {answers} {CUT}"
    assert "--hidden-size 48 contradicts --load-hf" in refusal(f"{data} --hidden-size 48")
    small = save_base(tmp_path / "small", vocab_size=300)
    message = refusal(f"--load-hf {small} --sft-data {answers} {CUT}")
    assert "the model has rows for 300 ids" in message
    assert "config.json" in refusal(f"--load-hf {tmp_path} --sft-data {answers} {CUT}")


@pytest.mark.slow
def test_a_missing_shard_and_a_broken_line_are_told_once(base: Path, tmp_path: Path) -> None:
    lines = [json.dumps(pair) for pair in pairs(12)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(lines))
    bad.write_text("\n".join([*lines, '{"prompt": "a", "completion": ']))
    for folder, data, code, message in (
        (base, bad, 1, f"{bad}:13: broken JSON"),
        (save_sharded(tmp_path / "hf"), good, 2, "model-00002-of-00005.safetensors is missing"),
    ):
        outcome = tune(f"--load-hf {folder} --sft-data {data}", 2, check=False)
        assert outcome.codes == (code, code), outcome
        assert outcome.err.count("error: ") == 1, outcome
        assert message in outcome.err, outcome


def save_sharded(folder: Path) -> Path:
    """A base model one of whose files is lost."""
    model = hf_models.llama_like("Llama", vocab_size=ROWS, max_position_embeddings=128)
    model.save_pretrained(folder, max_shard_size="30KB")  # type: ignore[operator]
    next(folder.glob("model-00002-of-*")).unlink()
    return chat_tokenizer(folder)
