"""What lies beside exported weights: the run's own tokenizer and template, its ends of a text, one number format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.huggingface.classes import with_number_format
from megalite.checkpoint.huggingface.travel import (
    companions,
    keep,
    kept_files,
    kept_here,
    laid_over,
    portable,
    use_kept,
    write_small_files,
)
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.config.schema_finetune import FinetuneConfig
from megalite.data.chat_template import load_chat
from megalite.data.segments import EOD_SIGN
from megalite.data.tokenizers import HuggingFaceTokenizer, build_tokenizer
from tests.data.chat_files import CHATML_TEMPLATE, SPECIAL, chat_tokenizer
from tests.data.corpora import SAMPLES

TURN = SPECIAL.index("<|im_end|>")


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
    config = tuned(other / "tokenizer.json" if bare else other, base, "chatml")
    files = companions(config, conversations=True)
    write_small_files(tmp_path / "out", {name: files[name] for name in files if name != "config.json"})
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs(text)["input_ids"] for text in SAMPLES] == ours.tokenize_batch(SAMPLES)
    assert theirs.eos_token_id == SPECIAL.index("<|endoftext|>")
    ends = [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")]
    assert json.loads(files["config.json"])["eos_token_id"] == ends
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["temperature"]) == (ends, 0.5)


def test_what_the_run_did_not_choose_stays_as_it_is_in_the_base(base: Path) -> None:
    config = tuned(base, base)
    config.finetune.task = "lm"
    everything = {path.name: path.read_bytes() for path in base.iterdir()}
    assert companions(config, conversations=False) == everything
    assert companions(tuned(base, base), conversations=False) == everything  # pairs alone: no turn ends
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    files = companions(tuned(base, base), conversations=True)
    assert {name for name in everything if files[name] == everything[name]} == tokenizer
    assert files.keys() == everything.keys()


@pytest.mark.parametrize("settings", [None, {}, {"temperature": 0.6}, {"eos_token_id": None}, {"eos_token_id": 3}])
def test_both_files_name_the_same_ends(base: Path, settings: dict[str, Any] | None) -> None:
    if settings is None:
        (base / "generation_config.json").unlink()
    else:
        (base / "generation_config.json").write_text(json.dumps(settings))
    files = companions(tuned(base, base), conversations=True)
    found = [json.loads(files[name]) for name in ("config.json", "generation_config.json")]
    assert [values["eos_token_id"] for values in found] == [[3, TURN]] * 2
    assert found[1].get("temperature") == (settings or {}).get("temperature")


def test_a_given_tokenizer_that_differs_in_its_settings_alone_is_the_one_that_travels(
    base: Path, tmp_path: Path
) -> None:
    other = chat_tokenizer(tmp_path / "other", "{{ messages[0].content }}", eos_token="<|endoftext|>")
    assert (other / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    files = companions(tuned(other, base), conversations=False)
    assert files["tokenizer_config.json"] == (other / "tokenizer_config.json").read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads(files[name])["eos_token_id"] == SPECIAL.index("<|endoftext|>")


def test_what_was_kept_at_the_first_save_serves_when_the_runs_own_files_changed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(CHATML_TEMPLATE, "utf-8")
    monkeypatch.chdir(tmp_path)
    config = tuned(Path("base"), Path("base"), "template.jinja")
    files = companions(config, conversations=True)
    keep(tmp_path / "run", files)
    template.write_text("changed", "utf-8")
    shutil.rmtree(base)
    monkeypatch.chdir("/")
    assert kept_files(tmp_path / "run", config) == files
    assert files["chat_template.jinja"].decode() == CHATML_TEMPLATE
    use_kept(config, kept_here(tmp_path / "run")[0])
    chat = load_chat(config.finetune.chat_template, build_tokenizer(config.tokenizer), config.tokenizer.tokenizer_model)
    assert chat.end_of_turn() == TURN
    keep(tmp_path / "run", {"chat_template.jinja": b"of another run"})
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["huggingface", "chat_template.jinja"]


@pytest.mark.parametrize("begin", ["\n", "", "  {% if true %}\n  {% endif %}"])
def test_a_template_with_its_variables_writes_all_that_it_wrote_without(tmp_path: Path, begin: str) -> None:
    from transformers import PreTrainedTokenizerFast

    source = begin + "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(source, "utf-8")
    folder = chat_tokenizer(tmp_path / "tokenizer", None, eos_token=None)
    tokenizer = HuggingFaceTokenizer(str(folder))
    assert tokenizer.eod == SPECIAL.index("<|endoftext|>")  # by its usual name; no file calls it so
    chat = load_chat(str(tmp_path / "template.jinja"), tokenizer, str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "a"}]
    text = portable(chat.template, tokenizer)
    written = theirs.apply_chat_template(messages, chat_template=text, tokenize=False)
    assert text != source
    assert written == chat.template.render(messages).replace(EOD_SIGN, "<|endoftext|>")


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
