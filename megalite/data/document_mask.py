"""What one sample becomes: inputs, labels, loss mask, positions and document ids.

Pure functions on arrays, along the last axis. The key idea: a document begins right after an end-of-document token
(EOD), which belongs to the document that it ends, and where the dataset's index says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Item = dict[str, np.ndarray]


class SampleSource(Protocol):
    """Samples by number; all of one shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


def document_begins(text: np.ndarray, eod: int, first: np.ndarray | None = None) -> np.ndarray:
    """Where a document begins, bool [..., S]: after an EOD, and where `first` (bool [..., S]) says that the dataset's
    index has one begin, so that documents without EOD are separated too. Never at the first place, before which there
    is nothing."""
    begins = np.zeros(text.shape, dtype=bool)
    begins[..., 1:] = text[..., :-1] == eod
    if first is not None:
        begins[..., 1:] |= first[..., 1:]
    return begins


def document_ids(begins: np.ndarray) -> np.ndarray:
    """Number of documents that ended before each position, int32 [..., S]."""
    return np.cumsum(begins, axis=-1).astype(np.int32)


def restarted_positions(begins: np.ndarray) -> np.ndarray:
    """Positions that start again at 0 with each document, int64 [..., S]."""
    places = np.broadcast_to(np.arange(begins.shape[-1], dtype=np.int64), begins.shape)
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


@dataclass(frozen=True)
class SampleFormat:
    """How documents inside a sample are separated: --reset-position-ids, --reset-attention-mask, --eod-mask-loss."""

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @property
    def divides(self) -> bool:
        """Whether it matters where documents begin."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def item(self, text: np.ndarray, first: np.ndarray | None = None) -> Item:
        """A sample from S + 1 token ids, int64 [S + 1]. `first`: see `document_begins`.

        tokens, labels and position_ids int64 [S]; loss_mask bool [S], with --eod-mask-loss False where the label
        begins another document, which can't be predicted; with --reset-attention-mask also document_ids int32 [S].
        """
        tokens, labels = text[:-1], text[1:]
        item = {"tokens": tokens, "labels": labels}
        item["loss_mask"] = np.ones(len(tokens), dtype=bool)
        item["position_ids"] = np.arange(len(tokens), dtype=np.int64)
        if not self.divides:
            return item
        begins = document_begins(text, self.eod, first)
        if self.eod_mask_loss:
            item["loss_mask"] = ~begins[1:]
        if self.reset_position_ids:
            item["position_ids"] = restarted_positions(begins[:-1])
        if self.reset_attention_mask:
            item["document_ids"] = document_ids(begins[:-1])
        return item
