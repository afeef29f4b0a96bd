"""Short token sequences in rows of one length: one a row with padding, or several a row without leakage.

The key idea: a sequence of n tokens takes n - 1 places of a row, since its last token is only a label. So no label
belongs to another sequence, and with attention and positions of its own each sequence computes what it would alone: the
loss of a pack is the sum of its parts.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.data.cache import MappedArrays
from megalite.data.document_mask import Item


@dataclass(frozen=True)
class TokenSequences(MappedArrays):
    """Sequences of token ids end to end.

    tokens: int32 [total]. counted: bool [total], True for a token that is a label whose loss counts. begins: int64
    [sequences + 1], where each sequence begins, and the end of the last. origins: int64 [sequences], the number of the
    line that each is of.
    """

    tokens: np.ndarray
    counted: np.ndarray
    begins: np.ndarray
    origins: np.ndarray

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64."""
        return np.diff(self.begins)


class SequenceBuilder:
    """Collects sequences in four bytes a token and one for its mark."""

    def __init__(self) -> None:
        self._tokens, self._counted = array.array("i"), bytearray()
        self._begins, self._origins = array.array("q", [0]), array.array("q")

    def add(self, tokens: Sequence[int], counted: Sequence[bool], origin: int | None = None) -> None:
        """One more sequence. `origin`: the number of its line; default its own."""
        self._origins.append(len(self._origins) if origin is None else origin)
        self._tokens.extend(tokens)
        self._counted.extend(counted)
        self._begins.append(len(self._tokens))

    def build(self) -> TokenSequences:
        """All sequences so far. Shares their memory: nothing can be added afterwards."""
        return TokenSequences(
            np.frombuffer(self._tokens, dtype=np.int32),
            np.frombuffer(self._counted, dtype=bool),
            np.frombuffer(self._begins, dtype=np.int64),
            np.frombuffer(self._origins, dtype=np.int64),
        )


@dataclass(frozen=True)
class Rows:
    """Which sequences share a row. order: int64, sequence numbers row by row. begins: int64 [rows + 1], where each
    row's part of `order` begins, and the end of the last."""

    order: np.ndarray
    begins: np.ndarray

    @classmethod
    def one_each(cls, chosen: np.ndarray) -> Rows:
        """Each of the chosen sequences in a row of its own."""
        return cls(chosen.astype(np.int64), np.arange(len(chosen) + 1, dtype=np.int64))

    @classmethod
    def best_fit(cls, chosen: np.ndarray, places: np.ndarray, capacity: int) -> Rows:
        """The chosen sequences in their order, each into the fullest row with room for it (best fit; Johnson 1974).

        places: int64, what each of them takes, 1 to `capacity`. A row's number is the order in which it was opened.
        """
        row_of = np.empty(len(chosen), dtype=np.int64)
        open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room they have
        rooms, opened = 0, 0  # bit r of `rooms`: there are rows with room r
        for n, need in enumerate(places.tolist()):
            fitting = rooms >> need
            if fitting:
                room = need + (fitting & -fitting).bit_length() - 1
                row = open_rows[room].pop()
                if not open_rows[room]:
                    rooms ^= 1 << room
            else:
                row, room, opened = opened, capacity, opened + 1
            row_of[n] = row
            open_rows[room - need].append(row)
            rooms |= 1 << (room - need)
        rooms_first = np.argsort(row_of, kind="stable")
        begins = np.zeros(opened + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=opened), out=begins[1:])
        return cls(chosen[rooms_first].astype(np.int64), begins)

    def __len__(self) -> int:
        return len(self.begins) - 1


class RowDataset:
    """A `SampleSource` of rows of S places.

    tokens, labels, position_ids int64 [S], loss_mask bool [S]; with `packed` also document_ids int32 [S] and lengths
    int64 [], the places before the padding. Positions
    restart at 0 with each sequence, and for the padding at the end, which is a document of its own, holds `pad` and
    never counts, whatever `pad` is. Without `packed` a row has one sequence: attention is causal, so it can't see the
    padding.
    """

    def __init__(self, sequences: TokenSequences, rows: Rows, *, seq_length: int, pad: int, packed: bool):
        self.sequences, self.rows = sequences, rows
        self.seq_length, self.pad, self.packed = seq_length, pad, packed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        length = self.seq_length
        item = {
            "tokens": np.full(length, self.pad, dtype=np.int64),
            "labels": np.full(length, self.pad, dtype=np.int64),
            "loss_mask": np.zeros(length, dtype=bool),
            "position_ids": np.empty(length, dtype=np.int64),
            "document_ids": np.empty(length, dtype=np.int32),
        }
        place = 0
        members = self.rows.order[self.rows.begins[index] : self.rows.begins[index + 1]]
        for document, member in enumerate(members):
            begin, end = self.sequences.begins[member : member + 2]
            part = slice(place, place + int(end - begin) - 1)
            item["tokens"][part] = self.sequences.tokens[begin : end - 1]
            item["labels"][part] = self.sequences.tokens[begin + 1 : end]
            item["loss_mask"][part] = self.sequences.counted[begin + 1 : end]
            item["position_ids"][part] = np.arange(part.stop - part.start)
            item["document_ids"][part] = document
            place = part.stop
        item["position_ids"][place:] = np.arange(length - place)
        item["document_ids"][place:] = len(members)
        if self.packed:
            item["lengths"] = np.array(place, dtype=np.int64)
        else:
            del item["document_ids"]
        return item


def trim(arrays: Item, multiple: int = 1) -> Item:
    """Stacked arrays [b, S] cut after the last place whose loss counts, rounded up to a multiple but not beyond S.

    What comes later changes no loss, since attention is causal. What looks at many tokens at once, as a router does,
    must not see it either: `lengths` int64 [b] are added, the places up to each row's last that counts. S should be a
    multiple of `multiple` itself (with sequence parallelism that of the tensor-parallel size). Arrays with one axis
    stay as they are.
    """
    mask = arrays["loss_mask"]
    lengths = np.where(mask.any(axis=1), mask.shape[1] - mask[:, ::-1].argmax(axis=1), 0)
    kept = min(mask.shape[1], -(-max(1, int(lengths.max())) // multiple) * multiple)
    arrays = {**arrays, "lengths": lengths.astype(np.int64)}
    return {name: np.ascontiguousarray(a[:, :kept]) if a.ndim == 2 else a for name, a in arrays.items()}
