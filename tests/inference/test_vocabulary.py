"""What a vocabulary says of texts that no tokenizer has seen yet."""

from __future__ import annotations

import base64
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalite.data.tokenizers import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)
from megalite.inference.vocabulary import characters_per_id
from tests.data.chat_files import chat_tokenizer
from tests.data.corpora import SAMPLES, sentencepiece_model


def changed(folder: Path, **parts: Any) -> HuggingFaceTokenizer:
    """A byte-level tokenizer with other parts, such as a normalizer."""
    file = str(chat_tokenizer(folder) / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    if "added" in parts:
        backend.add_tokens([parts.pop("added")])
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(file)
    return HuggingFaceTokenizer(file)


def ranks(folder: Path) -> TikTokenizer:
    tokens = [bytes([i]) for i in range(256)] + [b"  ", b"    ", b"th", b"the"]
    file = folder / "small.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(one) + b" %d\n" % n for n, one in enumerate(tokens)))
    return TikTokenizer(str(file))


@pytest.mark.parametrize("kind", ["hf", "nfc", "sentencepiece", "tiktoken"])
def test_no_text_has_more_characters_than_its_ids_can_stand_for(tmp_path: Path, kind: str) -> None:
    tokenizer: Tokenizer
    if kind == "sentencepiece":
        tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path))
    elif kind == "tiktoken":
        tokenizer = ranks(tmp_path)
    else:
        tokenizer = changed(tmp_path, **({"normalizer": tokenizers.normalizers.NFC()} if kind == "nfc" else {}))
    each = characters_per_id(tokenizer)
    longest = unicodedata.normalize("NFD", "\u1f82")
    for text in (
        *SAMPLES,
        " " * 1000,
        "\n" * 999,
        longest * 300,
        "<|endoftext|>" * 50,
        "\U0001f9ff" * 100,
        "\x00" * 99,
    ):
        assert len(text) <= each * len(tokenizer.tokenize(text))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": tokenizers.normalizers.Strip()},
        {"normalizer": tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " ")},
        {"normalizer": tokenizers.normalizers.NFKC()},
        {"pre_tokenizer": tokenizers.pre_tokenizers.Whitespace()},
        {"added": tokenizers.AddedToken("<mask>", lstrip=True)},
    ],
)
def test_a_tokenizer_that_drops_text_has_no_such_bound(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert characters_per_id(changed(tmp_path, **parts)) is None


def test_ids_written_as_text_have_no_such_bound() -> None:
    assert characters_per_id(NullTokenizer(9)) is None
