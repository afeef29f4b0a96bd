"""The loss of an add-one-smoothed bigram model: what a trained network has to beat.

P(next | previous) = (count(previous, next) + 1) / (count(previous) + vocabulary), counted on the training tokens
(Laplace smoothing; Jurafsky and Martin, Speech and Language Processing, ch. 3). The key idea: only pairs that occur in
the held-out tokens need counts, so memory doesn't grow with the square of the vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from megalite.config.errors import UserError
from megalite.data.indexed_dataset import IndexedDataset

BLOCK = 1 << 22  # training tokens in memory at once


def bigram_loss(train_prefix: str, valid_prefix: str, vocab_size: int) -> float:
    """Mean loss in nats per token of `valid_prefix`, every token but the first predicted from the one before it.

    Documents follow one another in the order of the file, as in training, so the first token of a document is
    predicted from the last (the EOD) of the one before. Raises UserError for ids outside the vocabulary and for
    fewer than two tokens.
    """
    pairs = [previous * vocab_size + following for previous, following in _pairs(valid_prefix, vocab_size)]
    if not pairs:
        raise UserError(f"{valid_prefix}: a bigram loss needs at least two tokens")
    wanted, weights = np.unique(np.concatenate(pairs), return_counts=True)
    counts = np.zeros(len(wanted), dtype=np.int64)
    totals = np.zeros(vocab_size, dtype=np.int64)
    for previous, following in _pairs(train_prefix, vocab_size):
        totals += np.bincount(previous, minlength=vocab_size)
        seen = previous * vocab_size + following
        place = np.minimum(np.searchsorted(wanted, seen), len(wanted) - 1)
        counts += np.bincount(place[wanted[place] == seen], minlength=len(wanted))
    losses = np.log(totals[wanted // vocab_size] + vocab_size) - np.log(counts + 1)
    return float(np.average(losses, weights=weights))


def _pairs(prefix: str, vocab_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(token, next token) over the whole file, as int64 arrays, block by block."""
    last = np.empty(0, dtype=np.int64)
    for block in _blocks(IndexedDataset(prefix)):
        if int(block.min()) < 0 or int(block.max()) >= vocab_size:
            raise UserError(f"{prefix} holds id {int(block.max())}, outside --vocab-size {vocab_size}")
        tokens = np.concatenate([last, block])
        if len(tokens) > 1:
            yield tokens[:-1], tokens[1:]
        last = tokens[-1:]


def _blocks(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    parts: list[np.ndarray] = []
    size = 0
    for n in range(len(dataset)):
        parts.append(dataset[n])
        size += len(parts[-1])
        if size >= BLOCK:
            yield np.concatenate(parts).astype(np.int64)
            parts, size = [], 0
    if size:
        yield np.concatenate(parts).astype(np.int64)


def main(arguments: Sequence[str]) -> int:
    """Print the loss; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megalite.data.bigram", description=bigram_loss.__doc__)
    parser.add_argument("--train", required=True, metavar="PREFIX", help="prefix of the training token files")
    parser.add_argument("--valid", required=True, metavar="PREFIX", help="prefix of the validation token files")
    parser.add_argument("--vocab-size", required=True, type=int, help="largest possible id + 1")
    args = parser.parse_args(arguments)
    loss = bigram_loss(args.train, args.valid, args.vocab_size)
    sys.stdout.write(f"bigram loss: {loss:.6f} nats per token\n")
    return 0


if __name__ == "__main__":
    from megalite.config.cli import run_tool

    sys.exit(run_tool(main))
