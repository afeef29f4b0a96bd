"""The three index arrays: equal to megatron-core's, without overflow, and safe to build by many processes at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.sample_index import (
    SampleIndex,
    build_index,
    load_or_build_index,
    samples_in,
)
from tests.data.token_files import megatron_sets, random_documents, write_tokens


@pytest.mark.parametrize("samples", [1, 40, 41, 55, 74, 75, 77, 80, 150, 200, 400])
@pytest.mark.parametrize("documents, empty", [(20, False), (23, True)])
def test_all_three_arrays_equal_megatron_cores(tmp_path: Path, samples: int, documents: int, empty: bool) -> None:
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    corpus = random_documents(documents, empty=empty)
    prefix = write_tokens(tmp_path / "a", corpus)
    theirs = megatron_sets((samples, 0, 0), blend=([prefix], None), split="100,0,0")[0]
    lengths = np.array([len(each) for each in corpus], dtype=np.int32)
    ours = build_index(lengths, 0, documents, num_samples=samples, seq_length=64, seed=1234)
    np.testing.assert_array_equal(ours.document_index, theirs.document_index)
    np.testing.assert_array_equal(ours.sample_index, theirs.sample_index)
    np.testing.assert_array_equal(ours.shuffle_index, theirs.shuffle_index)
    assert {array.dtype.name for array in vars(ours).values()} == {"int64"}


def test_indices_of_billions_of_tokens_stay_in_order() -> None:
    lengths = np.full(8, 2**28, dtype=np.int32)
    samples = samples_in(4 * 8 * 2**28, 2**20)
    index = build_index(lengths, 0, 8, num_samples=samples, seq_length=2**20, seed=0)
    assert len(index.document_index) == 32
    place = index.sample_index[:, 0] * 2**28 + index.sample_index[:, 1]
    assert (np.diff(place) == 2**20).all()
    assert index.sample_index.min() == 0
    assert sorted(index.shuffle_index.tolist()) == list(range(samples))


def _build(folder: str, notes: list[str] | None = None, **changes: Any) -> SampleIndex:
    lengths = np.array([len(each) for each in random_documents(50)], dtype=np.int32)
    settings: dict[str, Any] = {"num_samples": 200, "seq_length": 64, "seed": 1, **changes}
    first, last = settings.pop("documents", (0, 50))
    return load_or_build_index(
        lengths,
        first,
        last,
        folder=folder,
        label="a corpus/train",
        notes=notes if notes is not None else [],
        **settings,
    )


def _equal(a: SampleIndex, b: SampleIndex) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_the_cache_is_used_and_never_rewritten(tmp_path: Path) -> None:
    first = _build(str(tmp_path / "cache"))
    files = sorted((tmp_path / "cache").iterdir())
    assert [path.suffix for path in files] == [".npy"] * 3
    stamps = [path.stat().st_mtime_ns for path in files]
    second = _build(str(tmp_path / "cache"))
    assert isinstance(second.sample_index, np.memmap)
    assert _equal(first, second)
    assert [path.stat().st_mtime_ns for path in files] == stamps


@pytest.mark.parametrize("change", [{"seed": 2}, {"num_samples": 300}, {"seq_length": 63}, {"documents": (0, 49)}])
def test_every_dependency_is_in_the_name(tmp_path: Path, change: dict[str, Any]) -> None:
    cached = _build(str(tmp_path))
    changed = _build(str(tmp_path), **change)
    assert len(list(tmp_path.iterdir())) == 6
    assert not _equal(cached, changed)


def test_a_read_only_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # who may write anywhere: refused here as everybody else is by the system
        monkeypatch.setattr("megalite.files.atomic.open", refused, raising=False)
    notes: list[str] = []
    _build(str(tmp_path), notes)
    assert len(notes) == 1
    assert "Permission denied" in notes[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 200])
def test_a_damaged_cache_file_is_named_and_done_without(tmp_path: Path, length: int) -> None:
    good = _build(str(tmp_path))
    victim = next(path for path in tmp_path.iterdir() if "sample_index" in path.name)
    content = victim.read_bytes()
    victim.unlink()  # the file that is mapped stays whole
    victim.write_bytes(content[:length])
    notes: list[str] = []
    assert _equal(_build(str(tmp_path), notes), good)
    assert "damaged" in notes[0]


def test_a_pickled_index_names_its_files_instead_of_copying(tmp_path: Path) -> None:
    index = _build(str(tmp_path))
    assert len(pickle.dumps(index)) < 2000
    assert _equal(pickle.loads(pickle.dumps(index)), index)


def _build_at_once(folder: str, go: Any, results: Any) -> None:
    go.wait()
    for round_ in range(20):
        notes: list[str] = []
        index = _build(f"{folder}/{round_}", notes)
        results.put((round_, notes, int(index.shuffle_index[7]), index.sample_index.sum().item()))


def test_four_processes_build_one_cold_cache_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    go, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_build_at_once, args=(str(tmp_path), go, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    seen = [results.get(timeout=60) for _ in range(80)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len({each[2:] for each in seen}) == 1
    assert all(not each[1] for each in seen)
    for folder in tmp_path.iterdir():
        assert len(list(folder.glob("*.npy"))) == 3 == len(list(folder.iterdir()))
