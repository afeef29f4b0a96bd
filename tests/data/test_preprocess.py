"""Preprocessing: the same bytes for any number of workers, bad input by file and line, nothing left after a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocess import PreprocessOptions, Summary, preprocess
from tests.data.chat_files import put_template
from tests.data.corpora import SAMPLES, byte_level, sentencepiece_model, write_jsonl
from tests.helpers import memory_of

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


def run(inputs: Path | list[Path], prefix: Path, tokenizer: TokenizerConfig = NULL, **options: Any) -> Summary:
    files = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    return preprocess(PreprocessOptions(files, str(prefix), **options), tokenizer)


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    assert len(data) == data.num_documents
    return [data[n].tolist() for n in range(len(data))]


def content(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}_{key}_document.{end}").read_bytes() for end in ("bin", "idx"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sentencepiece_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (SAMPLES[n % len(SAMPLES)] * (n % 4) + f" {n} " for n in range(900))
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "c.jsonl", texts)


def test_tokens_are_the_tokenizers_and_eod_ends_each_document(model: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", SAMPLES)
    config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    truth = sentencepiece.SentencePieceProcessor(model_file=model)
    wanted = [truth.encode(text) for text in SAMPLES]
    summary = run(source, tmp_path / "plain", config)
    assert documents(tmp_path / "plain") == wanted
    assert (summary.documents, summary.tokens) == ({"text": len(SAMPLES)}, {"text": sum(map(len, wanted))})
    run(source, tmp_path / "eod", config, append_eod=True)
    assert documents(tmp_path / "eod") == [[*ids, truth.eos_id()] for ids in wanted]


def test_the_number_of_workers_and_chunks_changes_no_byte(model: str, corpus: Path, tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    runs = {"one": (1, 1 << 20), "small": (1, 3000), "two": (2, 5000)}
    for name, (workers, chunk_bytes) in runs.items():
        run(corpus, tmp_path / name, config, append_eod=True, workers=workers, chunk_bytes=chunk_bytes)
    assert content(tmp_path / "one") == content(tmp_path / "small") == content(tmp_path / "two")
    assert len(documents(tmp_path / "one")) == 900


def test_several_files_equal_their_concatenation(corpus: Path, tmp_path: Path) -> None:
    lines = [f'{{"text": "{n} {n + 1}"}}\n' for n in range(100)]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    parts = [tmp_path / f"p{n}.jsonl" for n in range(4)]
    for n, part in enumerate(parts):
        part.write_text("".join(lines[25 * n : 25 * n + 25]))
    run(tmp_path / "all.jsonl", tmp_path / "all")
    run(parts, tmp_path / "parts")
    preprocess(PreprocessOptions([str(tmp_path / "p*.jsonl")], str(tmp_path / "glob")), NULL)
    assert content(tmp_path / "all") == content(tmp_path / "parts") == content(tmp_path / "glob")


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("empty", ["", "   ", "\n\t\u3000"])
def test_empty_documents_are_skipped_and_counted(tmp_path: Path, append_eod: bool, place: int, empty: str) -> None:
    texts = ["1 2", "3"]
    texts.insert(place, empty)
    summary = run(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "o", append_eod=append_eod)
    end = [1000] if append_eod else []
    assert documents(tmp_path / "o") == [[1, 2, *end], [3, *end]]
    assert (summary.documents, summary.empty, summary.bad) == ({"text": 2}, {"text": 1}, 0)


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("texts", [["", "  "], []])
def test_a_file_of_only_empty_documents_is_an_error_and_writes_nothing(
    tmp_path: Path, append_eod: bool, texts: list[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=rf"a.jsonl: no text under the key 'text' \({len(texts)} empty"):
        run(source, tmp_path / "o", append_eod=append_eod)
    assert list(tmp_path.glob("o*")) == []


def test_keys_have_files_of_their_own_and_skip_their_own_empties(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "2 2"}, {"a": "", "b": "3"}, {"a": "4", "b": " "}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(tmp_path / "a.jsonl", tmp_path / "o", json_keys=["b", "a"])
    assert documents(tmp_path / "o", "a") == [[1], [4]]
    assert documents(tmp_path / "o", "b") == [[2, 2], [3]]
    assert summary.empty == {"a": 1, "b": 1}


BAD_LINES = {
    500: ("broken JSON", b'{"text": "1"'),
    510: ("not UTF-8", b'{"text": "\xff"}'),
    520: ("is not an id", b'{"text": "1 two"}'),
}


def test_bad_lines_of_every_kind_are_told_in_order_whatever_the_number_of_workers(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}' % (n % 7) for n in range(1, 600)]
    for number, (_, bad) in BAD_LINES.items():
        lines[number - 1] = bad
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    told: dict[int, list[str]] = {1: [], 2: []}
    for workers, lines_told in told.items():
        prefix = str(tmp_path / f"o{workers}")
        options = PreprocessOptions([f"{tmp_path}/a.jsonl"], prefix, on_error="skip", workers=workers, chunk_bytes=500)
        assert preprocess(options, NULL, lines_told.append).bad == len(BAD_LINES)
    with pytest.raises(UserError, match=r"a\.jsonl:500: broken JSON"):
        preprocess(replace(options, on_error="stop", workers=1), NULL)
    assert told[1] == told[2]
    for line, (number, (message, _)) in zip(told[1], BAD_LINES.items(), strict=True):
        assert line.startswith(f"skipped {tmp_path}/a.jsonl:{number}:") and message in line
    assert content(tmp_path / "o1") == content(tmp_path / "o2")


def test_all_bad_and_skipped_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x\ny\n" * 30)
    told: list[str] = []
    options = PreprocessOptions([str(tmp_path / "a.jsonl")], str(tmp_path / "o"), on_error="skip")
    with pytest.raises(UserError, match="0 empty documents, 60 bad ones"):
        preprocess(options, NULL, told.append)
    assert len(told) == 20
    assert list(tmp_path.glob("o*")) == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65498, "uint16"), (65499, "int32")],
)
def test_the_dtype_holds_the_largest_id_that_can_occur(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    # The EOD is one id more, so the vocabulary has vocab_size + 1 ids; below 65,500 they are uint16.
    source = write_jsonl(tmp_path / "a.jsonl", [f"0 {vocab_size - 1}"])
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size)
    run(source, tmp_path / "o", config, append_eod=True)
    assert documents(tmp_path / "o") == [[0, vocab_size - 1, vocab_size]]
    assert IndexedDataset(f"{tmp_path}/o_text_document").dtype == np.dtype(dtype)


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A", "[g] <s> $A </s>", "$A"])
def test_documents_are_the_text_alone_whatever_the_tokenizers_own_template(tmp_path: Path, template: str) -> None:
    learner = byte_level(300, "<s>", "</s>", "[g]")
    plain = [learner.encode(text).ids for text in SAMPLES]
    learner.save(str(tmp_path / "tokenizer.json"))
    put_template(tmp_path, template)
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    source = write_jsonl(tmp_path / "a.jsonl", SAMPLES)
    told: list[str] = []
    preprocess(PreprocessOptions([str(source)], str(tmp_path / "o")), config, told.append)
    assert documents(tmp_path / "o") == plain
    assert len([line for line in told if "only the ids of the text" in line]) == (template != "$A")
    run(source, tmp_path / "eod", config, append_eod=True)
    assert documents(tmp_path / "eod") == [[*ids, 1] for ids in plain]
    begin = [2, 0] if "[g]" in template else [0]  # the template's, or the BOS id where it has none
    run(source, tmp_path / "both", config, append_eod=True, prepend_bos=True)
    assert documents(tmp_path / "both") == [[*begin, *ids, 1] for ids in plain]


def test_prepend_bos_without_a_begin_id_and_a_folder_as_output_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="--output-prefix"):
        preprocess(PreprocessOptions([str(write_jsonl(tmp_path / "a.jsonl", ["1"]))], f"{tmp_path}/"), NULL)
    with pytest.raises(FlagError, match="--prepend-bos: this tokenizer has no begin-of-text id"):
        run(write_jsonl(tmp_path / "a.jsonl", ["1"]), tmp_path / "o", prepend_bos=True)
    assert list(tmp_path.glob("o*")) == []


def test_a_failure_keeps_the_files_of_an_earlier_run(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2"])
    run(source, tmp_path / "o")
    before = content(tmp_path / "o")
    with pytest.raises(UserError):
        run(write_jsonl(source, ["1 2", "x"]), tmp_path / "o")
    assert content(tmp_path / "o") == before
    assert len(list(tmp_path.glob("o*"))) == 3  # tokens, index, and which tokenizer made them


def test_plain_text_is_tokenized_whole_and_a_single_document_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2\n\n3\r\n4")
    told: list[str] = []
    options = PreprocessOptions([str(tmp_path / "a.txt")], str(tmp_path / "o"))
    preprocess(options, NULL, told.append)
    assert documents(tmp_path / "o") == [[1, 2, 3, 4]]
    assert "one document" in told[-1]
    preprocess(replace(options, text_documents="paragraph"), NULL)
    assert documents(tmp_path / "o") == [[1, 2], [3, 4]]


def test_progress_is_told_in_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3"] * 1000)
    told: list[str] = []
    options = PreprocessOptions([str(source)], str(tmp_path / "o"), log_interval=300, chunk_bytes=1000)
    summary = preprocess(options, NULL, told.append)
    assert len(told) == 3
    assert told[0].startswith("processed 3")
    assert summary.input_bytes == source.stat().st_size
    assert "text: 1,000 documents, 3,000 tokens, 0 empty skipped; 0 bad skipped" in str(summary)


def test_many_tiny_documents_need_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as stream:
        stream.writelines(f'{{"text": "{n % 1000}"}}\n' for n in range(100_000))
    setup = "from megalite.data.preprocess import *\n"
    setup += "config = TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=1000)"
    options = f"PreprocessOptions(['{tmp_path}/a.jsonl'], '{tmp_path}/o', append_eod=True)"
    _, memory = memory_of(f"preprocess({options}, config)", setup)
    data = IndexedDataset(f"{tmp_path}/o_text_document")
    assert (data.num_documents, data.num_tokens) == (100_000, 200_000)
    # The index needs 12 bytes a document; one chunk of lines with its objects, some megabytes.
    assert memory < 60e6
