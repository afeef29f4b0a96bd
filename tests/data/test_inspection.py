"""What is said about token files is what they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import FlagError, UserError
from megalite.data.indexed_dataset import IndexedDatasetBuilder
from megalite.data.inspection import describe_dataset
from megalite.data.tokenizers import NullTokenizer
from tests.data.token_files import write_tokens


def test_counts_lengths_and_first_documents_are_shown(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [], [4] * 6])
    text = "\n".join(describe_dataset(prefix, NullTokenizer(10), 2, 2))
    assert "a.bin: 18 bytes" in text
    assert "dtype uint16, 3 sequences, 3 documents, 9 tokens" in text
    assert "mean 3.0; 0 %: 0" in text
    assert "50 %: 3" in text
    assert "100 %: 6; empty: 1" in text
    assert "document 0, 3 tokens, ids: 1 2\ndocument 0, text: '1 2'" in text
    assert "document 1, 0 tokens" in text
    assert "document 2" not in text


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "a"), np.uint16) as builder:
        builder.add_document([1, 2, 3, 4], sequence_lengths=[1, 3])
        builder.add_document([5])
    lines = list(describe_dataset(str(tmp_path / "a"), None, 9, 9))
    assert "3 sequences, 2 documents, 5 tokens" in lines[2]
    assert lines[-2:] == ["document 0, 4 tokens, ids: 1 2 3 4", "document 1, 1 tokens, ids: 5"]


def test_no_documents_and_wrong_tokenizers_are_said(tmp_path: Path) -> None:
    assert "0 documents" in list(describe_dataset(write_tokens(tmp_path / "none", []), None, 2, 2))[-1]
    prefix = write_tokens(tmp_path / "a", [[50]])
    with pytest.raises(
        UserError, match=r"a: id 50 is outside the vocabulary of 11 ids; it was written with another tokenizer"
    ):
        list(describe_dataset(prefix, NullTokenizer(10), 1, 1))
    with pytest.raises(FlagError, match="--tokens 0"):
        list(describe_dataset(prefix, None, 1, 0))


def test_a_length_pointer_or_boundary_that_was_changed_is_named(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5], [6]])
    path = tmp_path / "a.idx"
    good = bytearray(path.read_bytes())
    lengths, pointers, documents = 34, 34 + 3 * 4, 34 + 3 * 12

    def changed(**bytes_at: int) -> str:
        content = bytearray(good)
        for place, value in bytes_at.items():
            content[int(place[1:])] = value
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            list(describe_dataset(prefix, None, 2, 2))
        return str(caught.value)

    # Two lengths that still sum to 6 tokens.
    assert "a.idx is damaged: sequence 1 has 1 tokens" in changed(**{f"b{lengths}": 4, f"b{lengths + 4}": 1})
    assert "a.idx is damaged: sequence 1 has 2 tokens from byte 4" in changed(**{f"b{pointers + 8}": 4})
    assert "a.idx is damaged: document 1 ends before it begins" in changed(**{f"b{documents + 8}": 3})
    path.write_bytes(good)
    assert "3 documents" in list(describe_dataset(prefix, None, 2, 2))[2]
