"""Training a tokenizer: exact round trips, the same file every time, and clear words about sizes that can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megalite.config.errors import FlagError, UserError
from megalite.data.tokenizer_training import PIECE_BYTES, TrainingOptions, even_sample, pieces, train_tokenizer
from tests.data.corpora import CHINESE, CODE, ENGLISH, ODD, SAMPLES, sentencepiece_model, write_jsonl


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_english_chinese_and_code_come_back_exactly(tmp_path: Path, model_type: str) -> None:
    size = 400 if model_type == "bpe" else 365
    path = sentencepiece_model(tmp_path, model_type=model_type, vocab_size=size)
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    for text in (*SAMPLES, *ODD):
        if "▁" not in text:
            assert processor.decode(processor.encode(text)) == text
    assert processor.get_piece_size() == size
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)


def test_frequent_words_characters_and_indentation_get_pieces_and_digits_stand_alone(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path)
    pieces_of = sentencepiece.SentencePieceProcessor(model_file=path).encode_as_pieces
    assert "\n" in "".join(pieces_of(CODE))
    assert not any("<0x0A>" in piece for piece in pieces_of(CODE))
    assert any(len(piece) > 1 and not piece.strip("▁") for piece in pieces_of(CODE))
    assert any(len(piece) > 2 for piece in pieces_of(ENGLISH))
    assert "天" in "".join(pieces_of(CHINESE))
    assert [piece for piece in pieces_of("2026") if piece in "0123456789"] == list("2026")


def test_the_same_corpus_gives_the_same_file(tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        models.append(Path(sentencepiece_model(tmp_path / name)).read_bytes())
    assert models[0] == models[1]


def train(tmp_path: Path, texts: list[str], vocab_size: int, **changes: Any) -> str:
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    return train_tokenizer(TrainingOptions([str(source)], str(tmp_path / "out"), vocab_size, **changes))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_larger_than_the_corpus_names_the_largest_that_works(tmp_path: Path, model_type: str) -> None:
    texts = [ENGLISH, CODE]
    with pytest.raises(UserError, match=r"--vocab-size 30000: \d+ bytes of text give at most \d+") as caught:
        train(tmp_path, texts, 30000, model_type=model_type)
    assert not (tmp_path / "out.model").exists()
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    path = train(tmp_path, texts, largest, model_type=model_type)
    assert sentencepiece.SentencePieceProcessor(model_file=path).get_piece_size() == largest


def test_a_vocabulary_too_small_for_the_characters_names_the_smallest_that_works(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--vocab-size 265: .* need at least \d+") as caught:
        train(tmp_path, [ENGLISH, CHINESE], 265)
    smallest = int(str(caught.value).split("at least ")[1].split(";")[0])
    train(tmp_path, [ENGLISH, CHINESE], smallest)
    with pytest.raises(UserError, match=f"need at least {smallest}"):
        train(tmp_path, [ENGLISH, CHINESE], smallest - 1)


@pytest.mark.parametrize("texts", [[], ["", "  \n"]])
def test_a_corpus_without_text_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"in.jsonl: there is no text to train on"):
        train(tmp_path, texts, 300)
    assert not (tmp_path / "out.model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"character_coverage": 0.5}, "--character-coverage 0.5"),
        ({"character_coverage": 2.0}, "--character-coverage 2.0"),
        ({"vocab_size": 0}, "--vocab-size 0"),
        ({"json_keys": ["text", "text"]}, "--json-keys"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        train(tmp_path, [ENGLISH], **({"vocab_size": 300} | changes))


def test_pieces_join_to_the_text_and_stay_short() -> None:
    for text in (CODE * 500, "文" * 9000, "word " * 5000, "\n" * 9000, "", "one line"):
        cut = list(pieces(text))
        assert "".join(cut) == text
        assert all(0 < len(piece.encode()) <= PIECE_BYTES for piece in cut)
    assert all(piece.endswith("\n") for piece in pieces(CODE * 500))


def test_the_sample_is_spread_evenly_and_fits() -> None:
    parts = [f"{n:04}" for n in range(1000)]
    assert even_sample(parts, 10**6) == parts
    assert even_sample(parts, 1000) == parts[::4]
    assert even_sample(parts, 1) == ["0000"]
