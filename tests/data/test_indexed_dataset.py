"""Token files: bytes equal to megatron-core's in both directions, and clear errors for damaged ones."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import UserError
from megalite.data.indexed_dataset import (
    HEADER,
    IndexedDataset,
    IndexedDatasetBuilder,
    best_dtype,
    sequence_pointers,
)
from tests.data.token_files import random_documents, write_tokens

megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")


def megatron_files(prefix: Path, documents: list[np.ndarray], dtype: type[np.number], lengths: list[list[int]]) -> str:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document, each in zip(documents, lengths, strict=True):
        builder.add_document(document, each)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float32, np.float64, np.uint16])
def test_bytes_equal_those_of_megatron_core(tmp_path: Path, dtype: type[np.number]) -> None:
    documents = [each % 100 for each in random_documents(40, empty=True)]
    lengths = [[len(each)] if len(each) < 9 else [4, 0, len(each) - 4] for each in documents]
    lengths[0] = []
    theirs = megatron_files(tmp_path / "theirs", documents, dtype, lengths)
    ours = str(tmp_path / "ours")
    with IndexedDatasetBuilder(ours, dtype) as builder:
        for document, each in zip(documents, lengths, strict=True):
            builder.add_document(document, each)
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_reads_what_megatron_core_wrote_and_the_reverse(tmp_path: Path, mmap: bool) -> None:
    documents = random_documents(30, empty=True)
    prefix = megatron_files(tmp_path / "theirs", documents, np.int32, [[len(each)] for each in documents])
    ours = IndexedDataset(prefix, mmap=mmap)
    theirs = megatron.IndexedDataset(write_tokens(tmp_path / "ours", documents, np.int32), mmap=mmap)
    assert len(ours) == len(theirs) == ours.num_documents == 30
    assert ours.num_tokens == sum(len(each) for each in documents)
    assert ours.dtype == np.int32
    for place, document in enumerate(documents):
        np.testing.assert_array_equal(ours[place], document)
        np.testing.assert_array_equal(theirs[place], document)
    np.testing.assert_array_equal(ours.sequence_lengths, theirs.sequence_lengths)
    np.testing.assert_array_equal(ours.document_indices, theirs.document_indices)


@pytest.mark.parametrize("mmap", [True, False])
def test_get_reads_a_part_and_refuses_what_lies_outside(tmp_path: Path, mmap: bool) -> None:
    data = IndexedDataset(write_tokens(tmp_path / "a", [[1, 2, 3, 4], [], [5]]), mmap=mmap)
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data.get(0, 2).tolist() == [3, 4]
    assert data.get(1).tolist() == []
    assert [each.tolist() for each in data] == [[1, 2, 3, 4], [], [5]]
    assert len(IndexedDataset(write_tokens(tmp_path / "none", []), mmap=mmap)) == 0
    empty = IndexedDataset(write_tokens(tmp_path / "empty", [[], []]), mmap=mmap)
    assert (len(empty), empty.num_tokens, empty[1].tolist()) == (2, 0, [])
    for arguments in [(3,), (-1,), (0, 5), (0, -1), (0, 3, 2)]:
        with pytest.raises(IndexError):
            data.get(*arguments)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_pickled_dataset_reads_the_same(tmp_path: Path, mmap: bool) -> None:
    data = IndexedDataset(write_tokens(tmp_path / "a", random_documents(5)), mmap=mmap)
    data.get(0)
    copy = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000
    np.testing.assert_array_equal(copy[3], data[3])


@pytest.mark.parametrize("vocab_size, expected", [(65499, "uint16"), (65500, "int32"), (65537, "int32")])
def test_the_largest_id_of_a_vocabulary_survives(tmp_path: Path, vocab_size: int, expected: str) -> None:
    dtype = best_dtype(vocab_size)
    assert dtype.name == expected == np.dtype(megatron.DType.optimal_dtype(vocab_size)).name
    data = IndexedDataset(write_tokens(tmp_path / "a", [[vocab_size - 1]], dtype))
    assert data[0].tolist() == [vocab_size - 1]


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path, token: int) -> None:
    with pytest.raises(UserError, match=f"{token} does not fit uint16"):
        write_tokens(tmp_path / "a", [[1, 2], [token]])
    assert list(tmp_path.iterdir()) == []


def test_pointers_of_large_files_do_not_overflow() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pointers = sequence_pointers(np.full(3, 2**30, np.int32), 4)
    assert pointers.tolist() == [0, 2**32, 2**33]
    assert pointers.dtype == np.int64


def test_the_index_appears_last_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "a")) as builder:
        builder.add_document([1, 2, 3])
        assert not (tmp_path / "a.bin").exists()
        assert not (tmp_path / "a.idx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    before = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    with pytest.raises(UserError):
        write_tokens(tmp_path / "a", [[9] * 100, [-1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert before == ((tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes())


def test_sequence_lengths_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sum to 5"):
        IndexedDatasetBuilder(str(tmp_path / "a")).add_document([1, 2, 3], [2, 3])


def test_joined_files_hold_both_and_equal_megatron_cores(tmp_path: Path) -> None:
    documents = random_documents(11, empty=True)
    parts = [write_tokens(tmp_path / f"part{i}", documents[i::3]) for i in range(3)] + [
        write_tokens(tmp_path / "e", [])
    ]
    with IndexedDatasetBuilder(str(tmp_path / "ours"), np.uint16) as ours:
        for part in parts:
            ours.add_index(IndexedDataset(part))
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        theirs.add_index(part)
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


DAMAGES: list[tuple[str, Callable[[bytes], bytes] | None, str]] = [
    (".bin", None, "no file"),
    (".idx", None, "interrupted"),
    (".bin", lambda data: data[:-2], "truncated"),
    (".bin", lambda data: data + b"\0\0", "the same run"),
    (".bin", lambda data: b"", "truncated"),
    (".idx", lambda data: data[:-2], "truncated or damaged"),
    (".idx", lambda data: data[:20], "truncated"),
    (".idx", lambda data: b"", "MMIDIDX"),
    (".idx", lambda data: b"PK" + data[2:], "MMIDIDX"),
    (".idx", lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2"),
    (".idx", lambda data: data[:17] + b"\x09" + data[18:], "dtype code 9"),
    (".idx", lambda data: data[:18] + struct.pack("<Q", 2**60) + data[26:], "truncated or damaged"),
    (".idx", lambda data: data[:-8] + struct.pack("<q", 7), "boundaries"),
]


@pytest.mark.parametrize("suffix, change, says", DAMAGES)
def test_a_damaged_file_gives_one_message_that_names_it(
    tmp_path: Path, suffix: str, change: Callable[[bytes], bytes] | None, says: str
) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5]])
    with pytest.raises(UserError, match=f"without {suffix}"):
        IndexedDataset(prefix + suffix)
    path = Path(prefix + suffix)
    content = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(content))
    with pytest.raises(UserError) as caught:
        IndexedDataset(prefix)
    assert prefix + suffix in str(caught.value)
    assert says in str(caught.value)


def test_a_second_builder_of_one_prefix_is_told_and_the_first_s_files_are_whole(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, np.uint16) as first:
        first.add_document([1, 2, 3])
        with pytest.raises(UserError, match=f"{prefix} is used by another run \\(process {os.getpid()} on"):
            IndexedDatasetBuilder(prefix, np.uint16)
        first.add_document([4])
    assert [row.tolist() for row in (IndexedDataset(prefix)[n] for n in range(2))] == [[1, 2, 3], [4]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def _begin_and_die(prefix: str) -> None:
    IndexedDatasetBuilder(prefix).add_document([1])
    os._exit(0)


def test_what_a_killed_builder_left_goes_with_the_next_one(tmp_path: Path) -> None:
    killed = multiprocessing.get_context("fork").Process(target=_begin_and_die, args=(str(tmp_path / "a"),))
    killed.start()
    killed.join(30)
    assert len(list(tmp_path.glob("*.tmp"))) == 2
    write_tokens(tmp_path / "a", [[2]])
    assert {path.suffix for path in tmp_path.iterdir()} <= {".bin", ".idx", ".owner"}


def test_a_length_that_was_changed_is_found_on_opening(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5], [6]])
    path = Path(prefix + ".idx")
    good = path.read_bytes()
    for byte in range(HEADER.size, HEADER.size + 12):  # 3 lengths of 4 bytes
        path.write_bytes(good[:byte] + bytes([good[byte] ^ 1]) + good[byte + 1 :])
        with pytest.raises(UserError, match=r"a\.(idx is damaged|bin is (truncated|not from the same run))"):
            IndexedDataset(prefix)
