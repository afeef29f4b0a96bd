"""Documents without files: random access and the rule."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from megalite.config.errors import UserError
from megalite.data.document_mask import SampleFormat
from megalite.data.mock import JITTER, NOISE, PERIOD, STRIDES, MockDataset

EOD, VOCABULARY = 130, 131


def mock(
    seed: int = 1234, split: int = 0, eod: int = EOD, vocab_size: int = VOCABULARY, seq_length: int = 64
) -> MockDataset:
    return MockDataset(
        seed=seed,
        split=split,
        vocab_size=vocab_size,
        seq_length=seq_length,
        num_samples=1000,
        sample_format=SampleFormat(eod),
    )


def test_any_part_of_the_stream_is_readable_on_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = mock().stream(0, 20000)
        for start, count in [(0, 1), (1, 1), (63, 200), (64, 1), (65, 64), (12345, 5000), (19999, 1)]:
            np.testing.assert_array_equal(mock().stream(start, count), stream[start : start + count])
    far = mock().stream(10**15, 10)
    assert ((far >= 0) & (far < VOCABULARY)).all()


def test_samples_share_one_token_with_their_neighbours() -> None:
    dataset = mock()
    stream = dataset.stream(0, 64 * 100 + 1)
    for place in range(100):
        item = dataset[place]
        np.testing.assert_array_equal(item["tokens"], stream[place * 64 : place * 64 + 64])
        np.testing.assert_array_equal(item["labels"], stream[place * 64 + 1 : place * 64 + 65])
    with pytest.raises(IndexError):
        dataset[1000]


def test_seed_and_split_change_the_text_and_nothing_else_does() -> None:
    streams = [mock(seed, split).stream(0, 500).tolist() for seed in (1, 2, 2**32 - 1) for split in (0, 1, 2)]
    assert len({tuple(each) for each in streams}) == 9
    assert mock(seq_length=100).stream(0, 500).tolist() == mock().stream(0, 500).tolist()


@pytest.mark.parametrize("eod, vocab_size", [(130, 131), (0, 131), (7, 20), (1, 2), (50256, 50257)])
def test_ids_fill_the_vocabulary_and_eod_only_ends_documents(eod: int, vocab_size: int) -> None:
    stream = mock(eod=eod, vocab_size=vocab_size).stream(0, 200000)
    assert stream.min() >= 0
    assert stream.max() < vocab_size
    ends = np.flatnonzero(stream == eod)
    lengths = np.diff(ends)
    assert lengths.min() == PERIOD - JITTER + 1
    assert lengths.max() == PERIOD + JITTER - 1
    assert lengths.mean() == pytest.approx(PERIOD, rel=1e-3)
    if vocab_size < 1000:
        assert len(np.unique(stream)) == vocab_size


def test_a_vocabulary_without_an_ordinary_id_is_refused() -> None:
    with pytest.raises(UserError, match="--mock-data"):
        mock(eod=0, vocab_size=1)


def test_a_document_walks_on_by_the_stride_that_its_first_token_gives_but_for_noise() -> None:
    stream = mock().stream(0, 64 * 6000)
    begins = np.flatnonzero(stream == EOD) + 1
    follows = []
    for begin, end in itertools.pairwise(begins):
        document = stream[begin : end - 1]
        follows += ((document[1:] - document[:-1]) % EOD == 1 + document[0] % STRIDES).tolist()
    assert np.mean(follows) == pytest.approx(1 - NOISE + NOISE / EOD, abs=0.003)
