"""Token files remember which tokenizer made them, and a run with another one says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megalite.config.schema import TokenizerConfig
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalite.data.inspection import describe_dataset
from megalite.data.merge import merge_datasets
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.splits import tokenizer_notes
from megalite.data.tokenizers import build_tokenizer
from tests.data.corpora import write_jsonl
from tests.data.token_files import run_config

WORDS = ("<|endoftext|>", "to", "be", "or", "not")


def words(folder: Path, *order: str) -> TokenizerConfig:
    """A tokenizer of whole words in this order."""
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(order)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="be")).save(str(folder / "tokenizer.json"))
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


@pytest.fixture
def mine(tmp_path: Path) -> TokenizerConfig:
    return words(tmp_path / "mine", *WORDS)


@pytest.fixture
def prefix(tmp_path: Path, mine: TokenizerConfig) -> str:
    source = write_jsonl(tmp_path / "c.jsonl", ["to", "not"])
    preprocess(PreprocessOptions([str(source)], str(tmp_path / "c")), mine)
    return f"{tmp_path}/c_text_document"


def notes(prefix: str, config: TokenizerConfig) -> list[str]:
    run = run_config(prefix)
    run.tokenizer = config
    return tokenizer_notes(run, build_tokenizer(config))


def test_another_tokenizer_of_the_same_size_is_told_and_the_same_one_elsewhere_is_not(
    tmp_path: Path, prefix: str, mine: TokenizerConfig
) -> None:
    assert notes(prefix, mine) == []
    assert notes(prefix, words(tmp_path / "moved", *WORDS)) == []
    assert notes(prefix, TokenizerConfig(**{**vars(mine), "parse_special_tokens": True})) == []
    (line,) = notes(prefix, words(tmp_path / "other", *reversed(WORDS)))
    assert line.startswith(f"warning: {prefix} was written with the tokenizer HuggingFaceTokenizer {tmp_path}/mine")
    assert "\n" not in line


def test_another_vocabulary_size_is_told(prefix: str) -> None:
    (line,) = notes(prefix, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000))
    assert "(5 ids" in line and "(1,001 ids" in line


def test_merging_keeps_what_all_parts_agree_on(tmp_path: Path, prefix: str) -> None:
    other = f"{tmp_path}/unknown"
    with IndexedDatasetBuilder(other, IndexedDataset(prefix).dtype) as builder:
        builder.add_document([1])
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)
    merge_datasets([prefix], f"{tmp_path}/same")
    assert len(notes(f"{tmp_path}/same", null)) == 1
    merge_datasets([prefix, other], f"{tmp_path}/same")  # over the old, which told something
    assert notes(f"{tmp_path}/same", null) == []


def test_files_that_another_program_wrote_over_the_old_are_not_judged_by_those(tmp_path: Path, prefix: str) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/new", IndexedDataset(prefix).dtype) as builder:
        builder.add_document([1, 2, 3])
    for end in ("bin", "idx"):
        Path(f"{tmp_path}/new.{end}").replace(f"{prefix}.{end}")
    assert notes(prefix, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)) == []


def test_an_inspection_names_the_tokenizer(tmp_path: Path, prefix: str) -> None:
    assert f"written with the tokenizer HuggingFaceTokenizer {tmp_path}/mine (5 ids" in "\n".join(
        describe_dataset(prefix, None, 0, 1)
    )
