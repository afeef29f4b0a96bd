"""Document boundaries inside a sample."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data.document_mask import SampleFormat

EOD = 99


def test_without_the_options_a_sample_is_one_document() -> None:
    item = SampleFormat(EOD).item(np.array([10, 11, EOD, 20, 21]))
    assert item["position_ids"].tolist() == [0, 1, 2, 3]
    assert item["loss_mask"].all()
    assert "document_ids" not in item


def test_documents_without_eod_are_told_apart_by_the_index_as_if_each_ended_with_one() -> None:
    text, first = np.array([10, 11, 12, 20, 21, 30]), np.array([True, False, False, True, False, True])
    item = SampleFormat(EOD, True, True, True).item(text, first)
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert item["document_ids"].tolist() == [0, 0, 0, 1, 1]
    assert item["loss_mask"].tolist() == [True, True, False, True, False]
    with_eod = np.array([10, 11, EOD, 20, EOD, 30])
    marked, plain = (SampleFormat(EOD, True, True, True).item(with_eod, each) for each in (first, None))
    for name in ("position_ids", "document_ids", "loss_mask"):
        assert marked[name].tolist() == plain[name].tolist() == item[name].tolist()


def test_masks_equal_megatron_cores() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    random = np.random.default_rng(1)
    for _ in range(20):
        tokens = random.integers(EOD - 4, EOD + 1, 30)
        attention, loss, positions = theirs._get_ltor_masks_and_position_ids(
            torch.from_numpy(tokens), EOD, True, True, True, True
        )
        item = SampleFormat(EOD, True, True, True).item(np.append(tokens, 0))
        assert item["position_ids"].tolist() == positions.tolist()
        assert item["loss_mask"].tolist() == loss.bool().tolist()
        ids = item["document_ids"]
        visible = (ids[:, None] == ids[None, :]) & np.tri(30, dtype=bool)
        np.testing.assert_array_equal(visible, ~attention[0].numpy())
