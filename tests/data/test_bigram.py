"""The bigram loss against a count by hand and against its closed forms."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import UserError
from megalite.data import bigram
from megalite.data.bigram import bigram_loss
from megalite.data.indexed_dataset import IndexedDatasetBuilder


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedDatasetBuilder(str(prefix), np.dtype(dtype)) as builder:
        for tokens in documents:
            builder.add_document(np.array(tokens, dtype=dtype))
    return str(prefix)


def by_hand(train: list[list[int]], valid: list[list[int]], vocab_size: int) -> float:
    """Dense table of counts, plain loops."""
    table = [[1] * vocab_size for _ in range(vocab_size)]
    stream = [token for document in train for token in document]
    for previous, following in itertools.pairwise(stream):
        table[previous][following] += 1
    held_out = [token for document in valid for token in document]
    losses = [-math.log(table[p][f] / sum(table[p])) for p, f in itertools.pairwise(held_out)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_the_loss_is_that_of_counts_by_hand_across_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(bigram, "BLOCK", block)
    source = np.random.default_rng(5)
    train = [source.integers(0, 11, size=n % 6).tolist() for n in range(80)]
    valid = [source.integers(0, 13, size=n % 4 + 1).tolist() for n in range(20)]
    loss = bigram_loss(write(tmp_path / "t", train), write(tmp_path / "v", valid), 13)
    assert loss == pytest.approx(by_hand(train, valid, 13), rel=1e-12)


def test_pairs_never_seen_cost_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "t", [[0, 0, 0]]), write(tmp_path / "v", [[1, 2], [3, 1]])
    assert bigram_loss(train, valid, 70_000) == pytest.approx(math.log(70_000), rel=1e-12)


def test_large_ids_do_not_overflow(tmp_path: Path) -> None:
    tokens = [199_998, 199_999] * 50
    train, valid = write(tmp_path / "t", [tokens], "int32"), write(tmp_path / "v", [[199_998, 199_999]], "int32")
    assert bigram_loss(train, valid, 200_000) == pytest.approx(math.log((50 + 200_000) / 51), rel=1e-12)


def test_ids_outside_the_vocabulary_and_too_few_tokens_are_refused(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "t", [[1, 2, 9]]), write(tmp_path / "v", [[1, 2]])
    with pytest.raises(UserError, match="holds id 9, outside --vocab-size 9"):
        bigram_loss(train, valid, 9)
    with pytest.raises(UserError, match="at least two tokens"):
        bigram_loss(train, write(tmp_path / "one", [[1]]), 10)


def test_the_command_prints_the_loss(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "t", [[0, 1] * 9]), write(tmp_path / "v", [[0, 1, 0]])
    command = [sys.executable, "-m", "megalite.data.bigram", "--train", train, "--valid", valid, "--vocab-size"]
    done = subprocess.run([*command, "2"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"bigram loss: {bigram_loss(train, valid, 2):.6f} nats per token\n"
    done = subprocess.run([*command, "1"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
