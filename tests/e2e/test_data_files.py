"""What a run says of its data."""

from __future__ import annotations

from pathlib import Path

from tests.data.token_files import random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, run, steps

NETWORK = MICRO.replace(MOCK, "").replace("--vocab-size 46", "--vocab-size 130")


def test_a_blend_trains_its_members_are_listed_and_a_cache_that_cannot_be_written_costs_a_note(tmp_path: Path) -> None:
    prefixes = [write_tokens(tmp_path / f"d{seed}", random_documents(60, seed=seed, empty=True)) for seed in (0, 1)]
    (tmp_path / "file").write_text("")
    flags = f"{NETWORK} --data-path 0.3 {prefixes[0]} 0.7 {prefixes[1]} --split 90,10,0 --eval-iters 1 --train-iters 2"
    outcome = run(f"{flags} --data-cache-path {tmp_path}/file/cache --metrics-file {tmp_path}/m.jsonl", 2)
    assert len(steps(tmp_path / "m.jsonl")) == 2
    assert f"{tmp_path}/file/cache" in outcome.out
    block = outcome.out.split("=" * 80)[1]
    assert all(block.count(prefix) == 2 for prefix in prefixes)  # train and valid


def test_the_opening_block_tells_epochs(tmp_path: Path) -> None:
    """641 tokens are 20 samples of 32 an epoch; 10 steps of 4 samples go through them twice."""
    prefix = write_tokens(tmp_path / "d", [[k % 130 for k in range(640)] + [130]])
    block = run(f"{NETWORK} --data-path {prefix} --split 1,0,0").out.split("=" * 80)[1]
    line = next(line for line in block.splitlines() if line.startswith(" data:"))
    assert all(word in line for word in ("train", prefix, "641", "20", "2.0")), line
