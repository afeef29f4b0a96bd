"""What one sample becomes: inputs, labels, loss mask, positions and document ids.

Pure functions on arrays of token ids, along the last axis. The key idea: an end-of-document token (EOD) belongs to the
document that it ends, so a document starts right after one.
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


def document_ids(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Number of EODs before each position, int32 [..., S]."""
    ends = tokens == eod
    return (np.cumsum(ends, axis=-1) - ends).astype(np.int32)


def restarted_positions(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Positions that start again at 0 after each EOD, int64 [..., S]."""
    places = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int64), tokens.shape)
    begins = np.zeros(tokens.shape, dtype=np.int64)
    begins[..., 1:] = np.where(tokens[..., :-1] == eod, places[..., 1:], 0)
    return places - np.maximum.accumulate(begins, axis=-1)


def eod_loss_mask(tokens: np.ndarray, eod: int) -> np.ndarray:
    """False where the input is an EOD, bool [..., S]: what starts the next document can't be foreseen."""
    return tokens != eod


@dataclass(frozen=True)
class SampleFormat:
    """How documents inside a sample are told apart: --reset-position-ids, --reset-attention-mask, --eod-mask-loss."""

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def item(self, text: np.ndarray) -> Item:
        """A sample from S + 1 token ids, int64 [S + 1].

        tokens, labels and position_ids int64 [S]; loss_mask bool [S]; with --reset-attention-mask also
        document_ids int32 [S].
        """
        tokens, labels = text[:-1], text[1:]
        item = {"tokens": tokens, "labels": labels}
        item["loss_mask"] = eod_loss_mask(tokens, self.eod) if self.eod_mask_loss else np.ones(len(tokens), dtype=bool)
        item["position_ids"] = (
            restarted_positions(tokens, self.eod) if self.reset_position_ids else np.arange(len(tokens), dtype=np.int64)
        )
        if self.reset_attention_mask:
            item["document_ids"] = document_ids(tokens, self.eod)
        return item
