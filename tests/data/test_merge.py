"""Merging token files equals preprocessing the joined corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.config.errors import UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.merge import expand_prefixes, merge_datasets
from megalite.data.preprocess import PreprocessOptions, preprocess
from tests.data.corpora import write_jsonl
from tests.data.token_files import write_tokens
from tests.helpers import memory_of

megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_merged_parts_equal_the_preprocessed_concatenation(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=500)
    texts = [" ".join(str((n * k) % 500) for k in range(n % 9 + 1)) for n in range(60)]
    (tmp_path / "parts").mkdir()
    for n in range(6):
        source = write_jsonl(tmp_path / f"{n}.jsonl", texts[10 * n : 10 * n + 10])
        preprocess(PreprocessOptions([str(source)], f"{tmp_path}/parts/p{n}", append_eod=True), config)
    source = write_jsonl(tmp_path / "all.jsonl", texts)
    preprocess(PreprocessOptions([str(source)], f"{tmp_path}/all", append_eod=True), config)
    counts = merge_datasets([str(tmp_path / "parts")], str(tmp_path / "merged"))
    whole = IndexedDataset(f"{tmp_path}/all_text_document")
    assert counts == (6, 60, whole.num_tokens)
    assert pair(tmp_path / "merged") == pair(tmp_path / "all_text_document")


def test_prefixes_keep_the_order_given_and_a_folder_is_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_tokens(tmp_path / "in" / name, [[ord(name)]])
    (tmp_path / "in" / "readme.txt").write_text("not a part")
    merge_datasets([f"{tmp_path}/in/c", f"{tmp_path}/in/a"], str(tmp_path / "given"))
    merge_datasets([f"{tmp_path}/in"], str(tmp_path / "folder"))
    given, folder = IndexedDataset(f"{tmp_path}/given"), IndexedDataset(f"{tmp_path}/folder")
    assert "".join(chr(given[n][0]) for n in range(2)) == "ca"
    assert "".join(chr(folder[n][0]) for n in range(3)) == "abc"


def test_many_parts_need_little_memory(tmp_path: Path) -> None:
    block = np.arange(1_000_000).astype(np.uint16)
    for n in range(20):
        write_tokens(tmp_path / "in" / f"part{n:02}", [block + np.uint16(n)])
    statement = f"print(merge_datasets(['{tmp_path}/in'], '{tmp_path}/out'))"
    counts, memory = memory_of(statement, "from megalite.data.merge import merge_datasets")
    assert counts == "(20, 20, 20000000)"
    assert memory < 30e6  # of 40 MB
    merged = IndexedDataset(f"{tmp_path}/out")
    assert all(np.array_equal(merged[n], block + np.uint16(n)) for n in (0, 1, 19))


def test_a_missing_damaged_or_repeated_part_is_named(tmp_path: Path) -> None:
    first = write_tokens(tmp_path / "in" / "a", [[1, 2, 3]])
    second = write_tokens(tmp_path / "in" / "b", [[4]])
    with pytest.raises(UserError, match=r"absent\.idx"):
        merge_datasets([first, str(tmp_path / "absent")], str(tmp_path / "out"))
    with pytest.raises(UserError, match="twice"):
        merge_datasets([str(tmp_path / "in"), first], str(tmp_path / "out"))
    with pytest.raises(UserError, match="is one of the parts"):
        merge_datasets([first, second], second)
    with pytest.raises(UserError, match="holds no .idx"):
        expand_prefixes([str(tmp_path)])
    Path(f"{second}.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"b\.bin is truncated"):
        merge_datasets([first, second], str(tmp_path / "out"))
    Path(f"{second}.bin").unlink()
    with pytest.raises(UserError, match=r"b\.bin is missing"):
        merge_datasets([str(tmp_path / "in")], str(tmp_path / "out"))
    assert list(tmp_path.glob("out*")) == []


def multimodal(prefix: Path, rows: list[tuple[list[int], int]]) -> str:
    """A pair whose sequences have modes, as megatron-core writes it."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16, multimodal=True)
    for tokens, mode in rows:
        builder.add_document(torch.tensor(tokens), [len(tokens)], [mode])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_modes_of_a_multimodal_index_are_kept_as_megatron_core_keeps_them(tmp_path: Path) -> None:
    parts = [multimodal(tmp_path / "a", [([1, 2], 0), ([3], 1)]), multimodal(tmp_path / "b", [([4], 1)])]
    merge_datasets(parts, str(tmp_path / "ours"))
    theirs = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16, multimodal=True)
    for one in parts:
        theirs.add_index(one)
    theirs.finalize(f"{tmp_path}/theirs.idx")
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    modes = IndexedDataset(str(tmp_path / "ours")).sequence_modes
    assert modes.tolist() == [0, 1, 1]


def test_parts_of_different_dtypes_or_with_and_without_modes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    small, large = write_tokens(tmp_path / "small", [[1]]), write_tokens(tmp_path / "large", [[70000]], np.int32)
    with pytest.raises(UserError, match=r"large holds int32 tokens and .*small uint16"):
        merge_datasets([small, large], str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"a\.idx has a mode for each sequence .* and .*small\.idx has none"):
        merge_datasets([small, multimodal(tmp_path / "a", [([1, 2], 0)])], str(tmp_path / "out"))
    assert list(tmp_path.glob("out*")) == []
