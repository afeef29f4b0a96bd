"""What one sample becomes: inputs, labels, loss mask, positions and document ids.

The key idea: a document begins right after an end-of-document token (EOD), which belongs to the document that it ends,
and where the dataset's index says so.
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
        """A sample from S + 1 token ids, int64 [S + 1]. `first`, bool [S + 1]: where the dataset's index has a document
        begin, so that documents without EOD are separated too.

        tokens, labels and position_ids int64 [S]; loss_mask bool [S], with --eod-mask-loss False where the label
        begins another document, which can't be predicted; with --reset-attention-mask also document_ids int32 [S].
        """
        tokens, labels = text[:-1], text[1:]
        places = np.arange(len(tokens), dtype=np.int64)
        item = {"tokens": tokens, "labels": labels, "loss_mask": np.ones(len(tokens), dtype=bool)}
        item["position_ids"] = places
        if not self.divides:
            return item
        label_begins = tokens == self.eod
        if first is not None:
            label_begins |= first[1:]
        begins = np.append(False, label_begins[:-1])  # before the first place there is nothing
        if self.eod_mask_loss:
            item["loss_mask"] = ~label_begins
        if self.reset_position_ids:
            item["position_ids"] = places - np.maximum.accumulate(np.where(begins, places, 0))
        if self.reset_attention_mask:
            item["document_ids"] = np.cumsum(begins).astype(np.int32)
        return item
