"""Training on token files: the index cache, several ranks and runs that share it, and what a run says of its data."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.data.token_files import random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, run, steps, written

NETWORK = MICRO.replace(MOCK, "").replace("--vocab-size 46", "--vocab-size 130")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every seventh of 80 documents is empty, the first among them."""
    return write_tokens(tmp_path_factory.mktemp("corpus") / "d", random_documents(80, empty=True))


@pytest.mark.slow
def test_four_ranks_build_a_cold_index_cache_and_reuse_it(corpus: str, tmp_path: Path) -> None:
    sizes = "--global-batch-size 8 --micro-batch-size 1 --eval-iters 1 --train-iters 2"
    flags = f"{NETWORK} --data-path {corpus} --split 80,10,10 {sizes}"
    cache = tmp_path / "cache"
    contents = []
    for attempt in ("cold", "cold again", "warm"):
        if attempt != "warm":
            shutil.rmtree(cache, ignore_errors=True)
        run(f"{flags} --data-cache-path {cache} --metrics-file {tmp_path}/{attempt.replace(' ', '-')}.jsonl", 4)
        contents.append({path.name: path.read_bytes() for path in cache.iterdir()})
    assert len(contents[0]) >= 9
    assert all(content == contents[0] for content in contents)
    first, *others = (written(path) for path in tmp_path.glob("*.jsonl"))
    assert len(others) == 2 and all(other == first for other in others)


@pytest.mark.slow
def test_two_runs_may_build_one_cold_cache_at_once(corpus: str, tmp_path: Path) -> None:
    flags = f"{NETWORK} --data-path {corpus} --train-iters 2"
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        both = [f"{flags} --data-cache-path {folder}/cache --metrics-file {folder}/{name}.jsonl" for name in "ab"]
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, both))
        assert written(folder / "a.jsonl") == written(folder / "b.jsonl")
        assert not list((folder / "cache").glob("*.tmp"))


def test_a_cache_that_can_not_be_written_costs_a_note_and_no_result(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = f"{NETWORK} --data-path {corpus} --train-iters 2"
    run(f"{flags} --metrics-file {tmp_path}/a.jsonl --data-cache-path {tmp_path}/cache")
    outcome = run(f"{flags} --metrics-file {tmp_path}/b.jsonl --data-cache-path {tmp_path}/file/cache", 2)
    assert len(written(tmp_path / "b.jsonl")) == 2
    assert f"{tmp_path}/file/cache" in outcome.out
    alone = run(f"{flags} --metrics-file {tmp_path}/c.jsonl --data-cache-path {tmp_path}/file/cache")
    assert written(tmp_path / "c.jsonl") == written(tmp_path / "a.jsonl")
    assert alone.out.count(f"{tmp_path}/file/cache") >= 1


def test_mapped_and_read_files_give_the_same_run(corpus: str, tmp_path: Path) -> None:
    flags = f"{NETWORK} --data-path {corpus} --train-iters 3 --num-workers 1"
    run(f"{flags} --metrics-file {tmp_path}/a.jsonl")
    run(f"{flags} --metrics-file {tmp_path}/b.jsonl --no-mmap-bin-files")
    assert written(tmp_path / "a.jsonl") == written(tmp_path / "b.jsonl")


def test_a_blend_trains_and_its_members_are_listed(corpus: str, tmp_path: Path) -> None:
    other = write_tokens(tmp_path / "other", random_documents(40, seed=5))
    flags = f"{NETWORK} --data-path 0.3 {corpus} 0.7 {other} --split 90,10,0 --eval-iters 1"
    outcome = run(f"{flags} --metrics-file {tmp_path}/m.jsonl", 2)
    assert len(steps(tmp_path / "m.jsonl")) == 10
    block = outcome.out.split("=" * 80)[1]
    assert all(block.count(prefix) == 2 for prefix in (corpus, other))  # train and valid


def test_the_opening_block_tells_epochs(tmp_path: Path) -> None:
    """641 tokens are 20 samples of 32 an epoch; 10 steps of 4 samples go through them twice."""
    prefix = write_tokens(tmp_path / "d", [[k % 130 for k in range(640)] + [130]])
    block = run(f"{NETWORK} --data-path {prefix} --split 1,0,0").out.split("=" * 80)[1]
    line = next(line for line in block.splitlines() if line.startswith(" data:"))
    assert all(word in line for word in ("train", prefix, "641", "20", "2.0")), line
