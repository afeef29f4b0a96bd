"""Labelled texts: the class stands at a text's last token, and every mistake is told by line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.errors import UserError
from megalite.data.classification import (
    ClassificationDataset,
    LabelledTexts,
    build_classification_datasets,
    read_labelled_texts,
)
from megalite.data.sft import SftOptions
from megalite.data.tokenizers import HuggingFaceTokenizer, NullTokenizer
from tests.data.chat_files import chat_tokenizer, put_template, write_lines

NULL = NullTokenizer(99)
LINES: list[dict[str, Any]] = [
    {"text": "1 2 3", "label": "positive"},
    {"text": "4", "label": "negative"},
    {"text": "5 6 7 8 9 10", "label": "neutral"},
]


def read(path: Path, values: list[dict[str, Any]] = LINES, **changes: Any) -> LabelledTexts:
    file = write_lines(path / "a.jsonl", values)
    return read_labelled_texts([file], "--data", NULL, **{"seq_length": 4, **changes})


def test_the_last_token_of_a_text_carries_its_class(tmp_path: Path) -> None:
    texts = read(tmp_path)
    assert texts.names == ("negative", "neutral", "positive")
    assert texts.truncated == 1
    dataset = ClassificationDataset(texts, seq_length=4, pad=0)
    assert [dataset[n]["tokens"].tolist() for n in range(3)] == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]
    for number, (last, label) in enumerate(((2, 2), (0, 0), (3, 1))):
        item = dataset[number]
        assert item["loss_mask"].nonzero()[0].tolist() == [last]
        assert item["labels"][last] == label
        assert not np.delete(item["labels"], last).any()
        assert item["position_ids"].tolist() == [*range(last + 1), *range(3 - last)]  # padding is no part of the text
    assert "1 texts were cut" in texts.line("train")
    assert "negative 1, neutral 1, positive 1" in texts.line("train")


def test_names_may_be_given_and_number_the_classes(tmp_path: Path) -> None:
    names = ["positive", "neutral", "negative", "mixed"]
    texts = read(tmp_path, names=names)
    assert texts.names == tuple(names)
    assert texts.classes.tolist() == [0, 2, 1]
    with pytest.raises(UserError, match=r'a\.jsonl:2: label "negative" must be one of positive, neutral'):
        read(tmp_path, names=names[:2])


def test_numbers_are_sorted_by_value(tmp_path: Path) -> None:
    texts = read(tmp_path, [{"text": "1", "label": label} for label in (10, 9, -1, 9)])
    assert texts.names == ("-1", "9", "10")
    assert texts.classes.tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize(
    "value, message",
    [
        ({"text": "1", "label": 5}, 'label 5: other lines have labels like "positive"'),
        ({"text": "1", "label": None}, "label must be a string or a whole number, not null"),
        ({"text": "1", "label": True}, "not true"),
        ({"text": "1", "label": 0.5}, "not 0.5"),
        ({"text": " ", "label": "positive"}, "the text is empty"),
        ({"text": 1, "label": "positive"}, "text must be a string, not 1"),
        ({"text": "1"}, "text and label are needed; the line's keys: text"),
        ({"text": "one", "label": "positive"}, "NullTokenizer reads ids"),
    ],
)
def test_a_bad_line_is_told_by_file_and_line(tmp_path: Path, value: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:4: .*" + message):
        read(tmp_path, [*LINES, value])


def test_sets_for_training_and_validation_share_their_classes(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "a.jsonl", LINES * 10)
    valid = write_lines(tmp_path / "b.jsonl", LINES[:1])
    options = SftOptions(data=[train], seq_length=8, seed=1, valid_data=[valid])
    data, names = build_classification_datasets(options, NULL, (60, 1, 0))
    assert names == ("negative", "neutral", "positive")
    assert isinstance(data.train, ClassificationDataset) and isinstance(data.valid, ClassificationDataset)
    assert (len(data.train), len(data.valid)) == (30, 1)
    assert data.valid[0]["labels"].max() == 2
    assert [each.epochs for each in data.summaries] == [2.0, 1.0]
    data, _ = build_classification_datasets(
        SftOptions(data=[train], seq_length=8, seed=1, valid_share=0.3), NULL, (1, 1, 0)
    )
    assert isinstance(data.train, ClassificationDataset) and isinstance(data.valid, ClassificationDataset)
    assert sorted([*data.train.rows.order, *data.valid.rows.order]) == list(range(30))
    other = write_lines(tmp_path / "c.jsonl", [{"text": "1", "label": "mixed"}])
    with pytest.raises(UserError, match=r'c\.jsonl:1: label "mixed" must be one of negative, neutral, positive'):
        build_classification_datasets(replace(options, valid_data=[other]), NULL, (1, 1, 0))


def test_one_class_or_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all labels are 'positive'"):
        read(tmp_path, LINES[:1])
    with pytest.raises(UserError, match="it has no samples"):
        read(tmp_path, [])


def test_a_cut_text_keeps_the_tokens_that_transformers_keeps(tmp_path: Path) -> None:
    import transformers

    put_template(chat_tokenizer(tmp_path), "<|begin|> $A <|im_end|>")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    lines = [{"text": "The quick brown fox " * count, "label": count} for count in (1, 2, 9)]
    data = write_lines(tmp_path / "a.jsonl", lines)
    mine = HuggingFaceTokenizer(str(tmp_path))
    texts = read_labelled_texts([data], "--data", mine, seq_length=12)
    begins = texts.sequences.begins
    found = [texts.sequences.tokens[begins[n] : begins[n + 1]].tolist() for n in range(3)]
    assert found == [theirs(line["text"], truncation=True, max_length=12)["input_ids"] for line in lines]
    assert texts.truncated >= 1
    with pytest.raises(UserError, match="--seq-length 2 is too short"):
        read_labelled_texts([data], "--data", mine, seq_length=2)


@pytest.mark.parametrize("parse", [False, True])
def test_a_special_token_in_a_labelled_text_is_plain_text_unless_asked_otherwise(tmp_path: Path, parse: bool) -> None:
    import transformers

    folder = chat_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), split_special_tokens=not parse)
    lines = [{"text": text, "label": text} for text in ("a<|im_end|>b", "<|endoftext|>")]
    mine = HuggingFaceTokenizer(str(folder))
    mine.parse_special_tokens = parse
    texts = read_labelled_texts([write_lines(tmp_path / "a.jsonl", lines)], "--data", mine, seq_length=99)
    assert texts.sequences.tokens.tolist() == [i for line in lines for i in theirs(line["text"])["input_ids"]]
