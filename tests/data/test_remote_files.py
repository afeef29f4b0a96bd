"""Token files in object storage: the copy on this machine, and what is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import UserError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.remote_files import local_prefix, remote_problem
from megalite.data.splits import check_token_files, data_digests
from tests.data.token_files import run_config, write_tokens
from tests.s3 import at, put


def stored(folder: Path, address: str, *documents: list[int]) -> str:
    """A prefix in storage."""
    prefix = write_tokens(folder / "corpus", [np.array(document) for document in documents])
    for suffix in (".bin", ".idx"):
        put(Path(prefix + suffix), address)
    return f"{address}/corpus"


def test_a_pair_is_copied_once_and_again_when_it_changes(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    prefix = stored(tmp_path, "memory://data/once", [1, 2, 3], [4, 5])
    first = local_prefix(prefix, cache)
    times = [path.stat().st_mtime_ns for path in sorted(Path(first).parent.iterdir())]
    assert local_prefix(prefix, cache) == first
    assert [path.stat().st_mtime_ns for path in sorted(Path(first).parent.iterdir())] == times
    assert [list(IndexedDataset(first)[i]) for i in range(2)] == [[1, 2, 3], [4, 5]]
    stored(tmp_path, "memory://data/once", [6, 7])
    assert list(IndexedDataset(local_prefix(prefix, cache))[0]) == [6, 7]
    assert list(IndexedDataset(first)[1]) == [4, 5]


def test_a_copy_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    prefix = stored(tmp_path, "memory://data/half", [1, 2, 3])
    Path(local_prefix(prefix, str(tmp_path / "cache")) + ".idx").unlink()
    assert list(IndexedDataset(local_prefix(prefix, str(tmp_path / "cache")))[0]) == [1, 2, 3]


def test_a_prefix_on_this_machine_stays_as_it_is() -> None:
    assert local_prefix("corpora/a", None) == "corpora/a"


def test_what_is_missing_is_told_by_its_flag(tmp_path: Path) -> None:
    prefix = stored(tmp_path, "memory://data/told", [1, 2, 3])
    config = run_config(prefix)
    assert check_token_files(config) == [
        f"--data-path: {prefix} is in object storage: name a folder on this machine for its copy with --data-cache-path"
    ]
    config.data.data_cache_path = str(tmp_path / "cache")
    assert check_token_files(config) == []
    assert data_digests(config).keys() == {f"{prefix}.idx"}
    at(f"{prefix}.idx").unlink()
    assert check_token_files(config) == [
        f"--data-path: no file {prefix}.idx; a data path is the prefix of a .bin and .idx pair"
    ]
    with pytest.raises(UserError, match="memory://data/told/corpus"):
        local_prefix(prefix, str(tmp_path / "cache"))


def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Protocol not known: nostore" in (remote_problem("nostore://data/corpus", "cache") or "")
