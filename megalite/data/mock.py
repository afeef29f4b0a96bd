"""Documents without files, for `--mock-data`: a rule that a model can learn, with noise that it can't.

A document's first token f is uniform over the V ordinary ids (all but EOD). It sets the document's stride
d = 1 + f mod 4. Each later token is the previous one plus d (mod V), or, with probability 0.1, uniform noise from which
the walk goes on. An EOD ends the document. Ids are numbered with EOD left out, so V = vocabulary size - 1. Document n
begins at token 64 n + j_n of the endless stream, j_n uniform in 0..31, so lengths vary between 33 and 95 tokens.

The key idea: every random number is a hash of (seed, split, document, place), so any token of the stream is a closed
formula and sample i can be read without the ones before it.
"""

from __future__ import annotations

import numpy as np

from megalite.config.errors import UserError
from megalite.data.document_mask import Item, SampleFormat

PERIOD = 64
JITTER = 32
STRIDES = 4
NOISE = 0.1
# What "the whole split once" means for a stream without end.
SAMPLES_OF_WHOLE_SPLIT = 256

_BEGIN, _NOISE, _TOKEN = 1, 2, 3


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class MockDataset:
    """Samples of S + 1 tokens from the stream of one split, which neighbours share by one token as in real data.

    split: 0 train, 1 valid, 2 test. Items as `SampleFormat.item` makes them.
    """

    def __init__(
        self, *, seed: int, split: int, vocab_size: int, seq_length: int, num_samples: int, sample_format: SampleFormat
    ) -> None:
        if vocab_size < 2 or not 0 <= sample_format.eod < vocab_size:
            raise UserError(f"--mock-data needs an ordinary id besides EOD; the vocabulary has {vocab_size} entries")
        self.seq_length = seq_length
        self.num_samples = num_samples
        self.format = sample_format
        self._ordinary = vocab_size - 1
        self._key = self._hash(np.array([seed, split], dtype=np.int64).astype(np.uint64))

    @staticmethod
    def _hash(words: np.ndarray, key: np.ndarray | None = None) -> np.ndarray:
        """Fold the rows of `words` into a key one by one."""
        state = np.zeros(words.shape[1:] or 1, dtype=np.uint64) if key is None else key
        for word in words:
            state = _mix((state + np.uint64(0x9E3779B97F4A7C15)) ^ _mix(np.atleast_1d(word)))
        return state

    def _random(self, document: np.ndarray, place: np.ndarray, use: int) -> np.ndarray:
        """uint64 for each (document, place in it); `use` tells the draws apart."""
        return self._hash(np.stack([document, place, np.full_like(place, use)]).astype(np.uint64), self._key)

    def _begins(self, document: np.ndarray) -> np.ndarray:
        """First stream position of each document."""
        jitter = self._random(document, np.zeros_like(document), _BEGIN) % np.uint64(JITTER)
        return document * PERIOD + jitter.astype(np.int64)

    def stream(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, int64."""
        # Document 0 may begin after position 0, so the stream is read one period on.
        first = (start + PERIOD) // PERIOD - 1
        documents = np.arange(first, (start + PERIOD + count) // PERIOD + 2, dtype=np.int64)
        begins = self._begins(documents)
        positions = np.arange(begins[0], start + PERIOD + count, dtype=np.int64)
        row = np.searchsorted(begins, positions, side="right") - 1
        place = positions - begins[row]
        document = documents[row]
        tokens = self._walk(document, place)
        tokens[positions + 1 == begins[row + 1]] = self.format.eod
        return tokens[start + PERIOD - begins[0] :]

    def _walk(self, document: np.ndarray, place: np.ndarray) -> np.ndarray:
        fresh = (self._random(document, place, _TOKEN) % np.uint64(self._ordinary)).astype(np.int64)
        noisy = (self._random(document, place, _NOISE) >> np.uint64(11)) * 2.0**-53 < NOISE
        index = np.arange(len(place))
        origin = np.maximum.accumulate(np.where(noisy | (place == 0), index, 0))
        stride = 1 + fresh[index - place] % STRIDES
        ids = (fresh[origin] + stride * (index - origin)) % self._ordinary
        return ids + (ids >= self.format.eod)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self.format.item(self.stream(index * self.seq_length, self.seq_length + 1))
