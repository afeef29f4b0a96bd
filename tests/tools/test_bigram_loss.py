"""The bigram loss against a count by hand and against its closed forms."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import UserError
from tests.data.token_files import write_tokens
from tests.helpers import call_script
from tools import bigram_loss as tool
from tools.bigram_loss import bigram_loss


def by_hand(train: list[list[int]], valid: list[list[int]], vocab_size: int) -> float:
    """Dense table of counts, plain loops."""
    table = [[1] * vocab_size for _ in range(vocab_size)]
    for previous, following in itertools.pairwise(itertools.chain.from_iterable(train)):
        table[previous][following] += 1
    held_out = itertools.pairwise(itertools.chain.from_iterable(valid))
    losses = [-math.log(table[p][f] / sum(table[p])) for p, f in held_out]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_the_loss_is_that_of_counts_by_hand_across_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(tool, "BLOCK", block)
    source = np.random.default_rng(5)
    train = [source.integers(0, 11, size=n % 6).tolist() for n in range(80)]
    valid = [source.integers(0, 13, size=n % 4 + 1).tolist() for n in range(20)]
    loss = bigram_loss(write_tokens(tmp_path / "t", train), write_tokens(tmp_path / "v", valid), 13)
    assert loss == pytest.approx(by_hand(train, valid, 13), rel=1e-12)


def test_pairs_never_seen_cost_the_logarithm_of_the_vocabulary_and_large_ids_do_not_overflow(tmp_path: Path) -> None:
    tokens = [199_998, 199_999] * 50
    train = write_tokens(tmp_path / "t", [tokens], np.int32)
    unseen, seen = (write_tokens(tmp_path / name, [ids], np.int32) for name, ids in (("u", [1, 2]), ("s", tokens[:2])))
    assert bigram_loss(train, unseen, 200_000) == pytest.approx(math.log(200_000), rel=1e-12)
    assert bigram_loss(train, seen, 200_000) == pytest.approx(math.log((50 + 200_000) / 51), rel=1e-12)


def test_ids_outside_the_vocabulary_and_too_few_tokens_are_refused(tmp_path: Path) -> None:
    train, valid = write_tokens(tmp_path / "t", [[1, 2, 9]]), write_tokens(tmp_path / "v", [[1, 2]])
    with pytest.raises(UserError, match="holds id 9, outside --vocab-size 9"):
        bigram_loss(train, valid, 9)
    with pytest.raises(UserError, match="at least two tokens"):
        bigram_loss(train, write_tokens(tmp_path / "one", [[1]]), 10)


def test_the_command_prints_the_loss(tmp_path: Path) -> None:
    train, valid = write_tokens(tmp_path / "t", [[0, 1] * 9]), write_tokens(tmp_path / "v", [[0, 1, 0]])
    done = call_script(Path(tool.__file__), "--train", train, "--valid", valid, "--vocab-size", 2)
    assert done.stdout == f"bigram loss: {bigram_loss(train, valid, 2):.6f} nats per token\n"
