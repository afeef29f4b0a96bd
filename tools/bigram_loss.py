"""Print the loss of an add-one-smoothed bigram model: what a trained network has to beat.

P(next | previous) = (count(previous, next) + 1) / (count(previous) + vocabulary), counted on the training tokens
(Laplace smoothing; Jurafsky and Martin, Speech and Language Processing, ch. 3). The key idea: only pairs that occur in
the held-out tokens need counts, so memory doesn't grow with the square of the vocabulary.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from lib.cli import run_tool
from megalite.config.errors import UserError
from megalite.config.flags import FlagParser, parse_namespace
from megalite.data.indexed_dataset import IndexedDataset, bin_path

BLOCK = 1 << 22  # tokens in memory at once


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
    dataset = IndexedDataset(prefix)
    for start in range(0, dataset.num_tokens - 1, BLOCK):
        block = np.fromfile(bin_path(prefix), dataset.dtype, BLOCK + 1, offset=start * dataset.dtype.itemsize)
        if int(block.min()) < 0 or int(block.max()) >= vocab_size:
            raise UserError(f"{prefix} holds id {int(block.max())}, outside --vocab-size {vocab_size}")
        yield block[:-1].astype(np.int64), block[1:].astype(np.int64)


def parser() -> FlagParser:
    flags = FlagParser("bigram_loss.py", "Print the loss of a bigram model, which a trained network has to beat.")
    flags.add_argument("--train", required=True, metavar="PREFIX", help="prefix of the training token files")
    flags.add_argument("--valid", required=True, metavar="PREFIX", help="prefix of the validation token files")
    flags.add_argument("--vocab-size", required=True, type=int, metavar="N", help="largest possible id + 1")
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    print(f"bigram loss: {bigram_loss(given.train, given.valid, given.vocab_size):.6f} nats per token")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
