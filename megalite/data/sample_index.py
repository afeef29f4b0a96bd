"""Which tokens make up sample i: three index arrays over a corpus of documents.

Documents are shuffled, laid end to end and cut every S tokens; then the cuts are shuffled. Three arrays hold that:
`document_index` (the shuffled documents of all epochs), `sample_index` (for each cut the place in `document_index` and
the offset there) and `shuffle_index` (a permutation of samples). Sample i runs from cut j to cut j + 1 inclusive,
j = shuffle_index[i], so it has S + 1 tokens and shares one with its neighbour: labels are the next tokens.

The key idea: cut j lies at token j * S of the laid-out corpus, so all cuts are one binary search in the cumulated
document lengths. Equal value for value to megatron-core 0.16's `GPTDataset`, in int64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalite.data.cache import MappedArrays, digest

# A last epoch that gives fewer than this share of an epoch's samples is shuffled on its own, so that its documents
# aren't drawn early in place of a whole epoch's.
LAST_EPOCH_THRESHOLD = 0.80
INDEX_VERSION = 1


@dataclass(frozen=True)
class SampleIndex(MappedArrays):
    """document_index int64 [epochs * documents], sample_index int64 [samples + 1, 2], shuffle_index int64 [samples]."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray

    def __len__(self) -> int:
        return len(self.shuffle_index)


EMPTY_INDEX = SampleIndex(np.zeros(0, np.int64), np.zeros((1, 2), np.int64), np.zeros(0, np.int64))


def samples_in(num_tokens: int, seq_length: int) -> int:
    """Samples of `seq_length` tokens and their labels that `num_tokens` tokens in a row hold."""
    return max(0, num_tokens - 1) // seq_length


def _epochs_needed(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> int:
    """The smallest n >= 1 with n * tokens_per_epoch >= num_samples * seq_length + 1; one where num_samples is None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index(
    lengths: np.ndarray, first: int, last: int, *, num_samples: int | None, seq_length: int, seed: int
) -> SampleIndex:
    """The three arrays for documents [first, last) of a corpus.

    lengths: tokens of each document, int [documents of the corpus]. num_samples: how many samples are wanted at least,
    or None for one epoch. Needs at least one token in the range. A last partial sequence is dropped.
    """
    per_epoch = int(lengths[first:last].sum(dtype=np.int64))
    epochs = _epochs_needed(per_epoch, num_samples, seq_length)
    total = samples_in(epochs * per_epoch, seq_length)
    joint = total
    separate = False
    if epochs > 1:
        assert num_samples is not None
        before_last = samples_in((epochs - 1) * per_epoch, seq_length)
        separate = num_samples - before_last < int(LAST_EPOCH_THRESHOLD * samples_in(per_epoch, seq_length))
        joint = before_last if separate else total
    random = np.random.RandomState(seed)
    document_index = _document_index(first, last, epochs, separate, random)
    return SampleIndex(
        document_index,
        _cut_documents(lengths[document_index], seq_length, total),
        _shuffle_index(joint, total, random),
    )


def _cut_documents(lengths: np.ndarray, seq_length: int, num_samples: int) -> np.ndarray:
    """Where each sample begins, int64 [num_samples + 1, 2]: (place in the list of documents, token offset there).

    lengths: tokens of the documents in the order in which they are laid out, int [n]; empty ones are passed over.
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    cuts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    index = np.empty((num_samples + 1, 2), dtype=np.int64)
    index[:, 0] = np.searchsorted(starts, cuts, side="right") - 1
    # megatron-core starts at the first document even where that is empty.
    index[0, 0] = 0
    index[:, 1] = cuts - starts[index[:, 0]]
    return index


def _document_index(first: int, last: int, epochs: int, separate: bool, random: np.random.RandomState) -> np.ndarray:
    documents = np.arange(first, last, dtype=np.int64)
    parts = (epochs - 1, 1) if separate else (epochs,)
    shuffled = [np.tile(documents, part) for part in parts]
    for part in shuffled:
        random.shuffle(part)
    return np.concatenate(shuffled)


def _shuffle_index(joint: int, total: int, random: np.random.RandomState) -> np.ndarray:
    index = np.arange(total, dtype=np.int64)
    random.shuffle(index[:joint])
    if joint < total:
        random.shuffle(index[joint:])
    return index


def load_or_build_index(
    lengths: np.ndarray,
    first: int,
    last: int,
    *,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    folder: str,
    label: str,
    notes: list[str],
) -> SampleIndex:
    """`build_index`, kept in `folder`. The name hashes the documents' lengths, so it depends on nothing else."""
    key = {
        "version": INDEX_VERSION,
        "lengths": digest(np.ascontiguousarray(lengths[first:last], dtype="<i4").data),
        "documents": [first, last],
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
        "threshold": LAST_EPOCH_THRESHOLD,
    }

    def build() -> SampleIndex:
        return build_index(lengths, first, last, num_samples=num_samples, seq_length=seq_length, seed=seed)

    return SampleIndex.cached(folder, label, key, build, notes)
