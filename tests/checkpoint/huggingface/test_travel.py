"""What lies beside exported weights: the run's own tokenizer and template, its ends of a text, one number format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.huggingface.classes import with_number_format
from megalite.checkpoint.huggingface.travel import companions, laid_over, spoken_by, token_ids, write_small_files
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.config.schema_finetune import FinetuneConfig
from megalite.data.tokenizers import HuggingFaceTokenizer
from tests.data.chat_files import SPECIAL, chat_tokenizer
from tests.data.corpora import SAMPLES


def tuned(tokenizer: Path, base: Path, template: str | None = None) -> RunConfig:
    """The configuration of a run on chats."""
    return RunConfig(
        finetune=FinetuneConfig(task="sft", load_hf=str(base), chat_template=template),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer)),
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder whose tokenizer calls another token the end."""
    folder = chat_tokenizer(tmp_path / "base", eos_token="<|begin|>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0], "temperature": 0.5}))
    return folder


@pytest.mark.parametrize("bare", [False, True], ids=["a folder", "a tokenizer.json alone"])
def test_a_tokenizer_that_replaced_the_bases_travels_and_its_ids_end_texts(
    base: Path, tmp_path: Path, bare: bool
) -> None:
    from transformers import AutoTokenizer

    other = chat_tokenizer(tmp_path / "other", eos_token="<|endoftext|>", pad_token=None, bos_token=None)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:20]  # other ids for the same text
    (other / "tokenizer.json").write_text(json.dumps(content))
    if bare:
        (other / "tokenizer_config.json").unlink()
    ours = HuggingFaceTokenizer(str(other))
    assert ours.tokenize_batch(SAMPLES) != HuggingFaceTokenizer(str(base)).tokenize_batch(SAMPLES)
    spoken = spoken_by(tuned(other / "tokenizer.json" if bare else other, base, "chatml"))
    (tmp_path / "out").mkdir()
    write_small_files(tmp_path / "out", companions(spoken, base))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs(text)["input_ids"] for text in SAMPLES] == ours.tokenize_batch(SAMPLES)
    assert theirs.eos_token_id == SPECIAL.index("<|endoftext|>")
    ends = [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")]
    assert token_ids(spoken, base)["eos_token_id"] == ends
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["temperature"]) == (ends, 0.5)


def test_what_the_run_did_not_choose_stays_as_it_is_in_the_base(base: Path) -> None:
    config = tuned(base, base)
    config.finetune.task = "lm"
    files = companions(spoken_by(config), base)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert files[name] == (base / name).read_bytes()
    assert token_ids(spoken_by(config), base) == {"eos_token_id": 3, "pad_token_id": 2}
    assert token_ids(spoken_by(tuned(base, base)), base)["eos_token_id"] == [3, 2]


def test_a_given_template_takes_the_place_of_all_others() -> None:
    files = {"chat_template.json": b"{}", "additional_chat_templates/tools.jinja": b"", "tokenizer.model": b"base"}
    files |= {"tokenizer_config.json": json.dumps({"chat_template": "old", "eos_token": "</s>"}).encode()}
    found = laid_over(files, {"chat_template.jinja": b"new"})
    assert found.keys() == {"chat_template.jinja", "tokenizer.model", "tokenizer_config.json"}
    assert json.loads(found["tokenizer_config.json"]) == {"eos_token": "</s>"}
    replaced = laid_over(files, {"tokenizer.json": b"own", "chat_template.jinja": b"new"})
    assert replaced == {"tokenizer.json": b"own", "chat_template.jinja": b"new"}


@pytest.mark.parametrize(
    ("values", "name"),
    [({}, "dtype"), ({"torch_dtype": "a"}, "torch_dtype"), ({"torch_dtype": "a", "dtype": "b"}, "dtype")],
)
def test_config_json_names_one_number_format(values: dict[str, Any], name: str) -> None:
    assert with_number_format(values, "bfloat16") == {name: "bfloat16"}
