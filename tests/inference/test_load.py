"""What is loaded is what was saved, as its checkpoint says and the flags change it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.checkpoint.index import INDEX_FILE
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import PrecisionConfig, TokenizerConfig
from megalite.inference.load import load_for_generation, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from megalite.models.whole import build_whole
from megalite.nn.module import named_specs
from tests.checkpoint.huggingface import folders
from tests.data.corpora import sentencepiece_model
from tests.helpers import LLAMA
from tests.inference.checkpoints import HF_ROWS, generate, save_hf, save_tiny

ONE_THREAD = {"layout.threads_per_rank": 1}


@pytest.mark.parametrize(
    ("precision", "given", "name"),
    [
        (PrecisionConfig(), {}, "fp32"),
        (PrecisionConfig(bf16=True), {}, "bf16"),
        (PrecisionConfig(bf16=True), {"precision.fp64": True}, "fp64"),
        (PrecisionConfig(fp64=True), {"precision.bf16": True}, "bf16"),
        (PrecisionConfig(), {"precision.fp16": True}, "fp16"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_weight_is_the_saved_one_in_the_wanted_format(
    tmp_path: Path, precision: PrecisionConfig, given: dict[str, Any], name: str
) -> None:
    saved = save_tiny(tmp_path, precision=precision, make_vocab_size_divisible_by=128, **LLAMA)
    loaded = load_for_generation(str(tmp_path), given={"layout.threads_per_rank": 1, **given})
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16}[name]
    weights = {name: (parameter, spec) for name, parameter, spec in named_specs(saved)}
    for name_, parameter, spec in named_specs(loaded.model):
        assert parameter.dtype == wanted
        assert not parameter.requires_grad
        box = spec.boxes[0].local_slices  # without the vocabulary's padding
        assert torch.equal(parameter[box], weights[name_][0][box].to(wanted))
    assert loaded.notes == [f"iteration 10 of {tmp_path}, {name} on cpu"]


def test_the_newest_checkpoint_or_the_one_asked_for_is_loaded(tmp_path: Path) -> None:
    models = {iteration: save_tiny(tmp_path, iteration=iteration) for iteration in (5, 10)}
    given = {"layout.threads_per_rank": 1}
    for step, iteration in ((None, 10), (5, 5), (10, 10)):
        loaded = load_for_generation(str(tmp_path), step=step, given=given)
        assert torch.equal(loaded.model.output_weight, models[iteration].output_weight)
    (tmp_path / "iter_0000010" / INDEX_FILE).unlink()  # damaged: passed over
    loaded = load_for_generation(str(tmp_path), given=given)
    assert torch.equal(loaded.model.output_weight, models[5].output_weight)
    assert "iter_0000005" in loaded.notes[0]


def test_what_can_not_be_loaded_is_named(tmp_path: Path) -> None:
    for folder, says in (("nowhere", r"--load .*nowhere"), ("", "no checkpoint")):
        with pytest.raises(UserError, match=says):
            load_for_generation(str(tmp_path / folder))
    save_tiny(tmp_path)
    with pytest.raises(FlagError, match="--bf16 and --fp64 exclude each other"):
        load_for_generation(str(tmp_path), given={"precision.bf16": True, "precision.fp64": True})


def test_dropout_and_the_kernel_of_training_play_no_part(tmp_path: Path) -> None:
    save_tiny(tmp_path, window_size="3,0", attention_backend="unfused")
    config = load_for_generation(str(tmp_path), given={"layout.threads_per_rank": 1}).config
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0.0, 0.0)
    assert config.model.attention_backend == "auto"
    assert config.model.window_size == "3,0"


def test_a_tokenizer_that_moved_is_named_by_flag(tmp_path: Path) -> None:
    old = sentencepiece_model(tmp_path)
    tokenizer = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=old, vocab_size=400)
    save_tiny(tmp_path / "run", tokenizer=tokenizer, vocab_size=400)
    new = shutil.move(old, tmp_path / "moved.model")
    with pytest.raises(UserError, match=r"--tokenizer-model .*small\.model"):
        load_for_generation(str(tmp_path / "run"))
    given = {"tokenizer.tokenizer_model": str(new), "layout.threads_per_rank": 1}
    assert load_for_generation(str(tmp_path / "run"), given=given).tokenizer.vocab_size == 400


def test_a_tokenizer_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "run")
    other = {
        "tokenizer.tokenizer_type": "SentencePieceTokenizer",
        "tokenizer.tokenizer_model": sentencepiece_model(tmp_path),
    }
    with pytest.raises(UserError, match=r"small\.model has 400 ids.*trained with 131"):
        load_for_generation(str(tmp_path / "run"), given=other)
    with pytest.raises(UserError, match=r"NullTokenizer has 51 ids.*trained with 131"):
        load_for_generation(str(tmp_path / "run"), given={"tokenizer.vocab_size": 50})


def test_a_hugging_face_folder_continues_greedily_as_transformers(tmp_path: Path) -> None:
    import transformers

    loaded = load_huggingface_for_generation(str(save_hf(tmp_path)), given=ONE_THREAD)
    assert loaded.notes == [f"{tmp_path}, fp32 on cpu"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    suppressed = list(range(loaded.tokenizer.vocab_size, HF_ROWS))
    for prompt in ([5, 6, 7], [301, 12, 300, 44, 2]):
        how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "suppress_tokens": suppressed}
        expected = theirs.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        options = GenerationOptions(max_new_tokens=40)
        assert generate(loaded.model, [prompt], options, unknown=loaded.unknown) == [expected]


def test_ids_that_the_tokenizer_lacks_are_never_chosen(tmp_path: Path) -> None:
    loaded = load_huggingface_for_generation(str(save_hf(tmp_path)), given=ONE_THREAD)
    known = loaded.tokenizer.vocab_size
    assert loaded.unknown.tolist() == list(range(known, HF_ROWS))
    for options in (GenerationOptions(), GenerationOptions(temperature=1e6)):
        free = generate(loaded.model, [[1]] * 8, options)
        assert options.greedy or any(token >= known for row in free for token in row)
        kept = generate(loaded.model, [[1]] * 8, options, unknown=loaded.unknown)
        assert all(token < known for row in kept for token in row)


def test_a_folder_says_which_ids_end_a_text_and_how_long_one_is(tmp_path: Path) -> None:
    folder = save_hf(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    loaded = load_huggingface_for_generation(str(folder), given=ONE_THREAD)
    assert loaded.tokenizer.eod is not None
    assert loaded.ends == {3, 7, loaded.tokenizer.eod}
    assert loaded.context == 256


def test_a_converted_checkpoint_is_the_folder_again(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "hf")
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    ours = load_for_generation(str(tmp_path / "run"), given=ONE_THREAD)
    theirs = load_huggingface_for_generation(str(source), given=ONE_THREAD)
    for (name, one, spec), (_, other, _) in zip(named_specs(ours.model), named_specs(theirs.model), strict=True):
        box = spec.boxes[0].local_slices  # without the vocabulary's padding
        assert torch.equal(one[box], other[box]), name
    assert (ours.ends, ours.context) == (theirs.ends, theirs.context)
    assert torch.equal(ours.unknown, theirs.unknown)


def test_half_precision_weights_stay_so(tmp_path: Path) -> None:
    folder = folders.save("llama, grouped, tied", tmp_path, dtype=torch.bfloat16)
    assert load_huggingface_for_generation(str(folder), given=ONE_THREAD).model.output_weight.dtype == torch.bfloat16
    given = {**ONE_THREAD, "precision.fp64": True}
    assert load_huggingface_for_generation(str(folder), given=given).model.output_weight.dtype == torch.float64
