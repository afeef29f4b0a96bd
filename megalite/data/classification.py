"""Texts with labels, for fine-tuning a classifier: JSON lines of `{"text": "...", "label": ...}`.

The key idea: a classifier reads its answer off a text's last token. So a sample is a padded row whose only counted
place is that token, and whose label there is the number of the class: loaders, loss masks and counts of training work
as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megalite.config.errors import UserError
from megalite.data.cache import SampleCache
from megalite.data.document_mask import Item
from megalite.data.gpt_dataset import Datasets
from megalite.data.jsonl import Line, Progress, read_lines
from megalite.data.packing import RowDataset, Rows, SequenceBuilder, TokenSequences
from megalite.data.segments import TextEncoder
from megalite.data.sft import NO_SAMPLES, SftOptions, add_sets, problems_of_first_lines
from megalite.data.text_input import excerpt
from megalite.data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class LabelledTexts:
    """tokens of each text; classes: int64 [texts], places in `names`. truncated: texts cut to fit."""

    sequences: TokenSequences
    classes: np.ndarray
    names: tuple[str, ...]
    truncated: int

    def line(self, name: str) -> str:
        """One line for people."""
        counts = np.bincount(self.classes, minlength=len(self.names))
        shares = ", ".join(f"{label} {count:,}" for label, count in zip(self.names, counts, strict=True))
        cut = f"; {self.truncated:,} texts were cut to --seq-length" if self.truncated else ""
        return f"{name}: {len(self.classes):,} texts ({shares}){cut}"


def read_labelled_texts(
    paths: Sequence[str],
    flag: str,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    names: Sequence[str] | None = None,
    cache: SampleCache | None = None,
    notes: list[str] | None = None,
) -> LabelledTexts:
    """The texts of some files, in order, each with its first `seq_length` tokens; what the tokenizer's own template
    puts after every text stays at its end, as with transformers' `truncation=True`.

    A label is a string or a whole number. names: the classes in order; None: those that occur, sorted (numbers by
    value). cache: where they are kept; `notes` gets messages about it. Raises UserError with file and line for
    a line that can't be used or a label that isn't in `names`.
    """

    def build(progress: Progress | None = None) -> _Encoded:
        builder, encoder, cut = SequenceBuilder(), TextEncoder(tokenizer), 0
        labels: list[str | int] = []
        for line in (line for path in paths for line in read_lines(path, flag, progress)):
            ids, label = _encode(line, encoder), _label(line, names)
            if labels and type(label) is not type(labels[0]):
                raise line.error(f"label {excerpt(label)}: other lines have labels like {excerpt(labels[0])}")
            if len(ids) > seq_length:
                ids, cut = encoder.cut(ids, seq_length), cut + 1
            builder.add(ids, [False] * len(ids))
            labels.append(label)
        if not labels:
            raise UserError(f"{flag} {' '.join(paths)}: {NO_SAMPLES}")
        labels_and_cut = np.frombuffer(json.dumps([labels, cut]).encode(), np.uint8)
        return _Encoded(**vars(builder.build()), labels_and_cut=labels_and_cut)

    key = {"seq_length": seq_length, "labels": names}
    notes = [] if notes is None else notes
    found = build() if cache is None else cache.samples(_Encoded, tokenizer, paths, key, build, notes)
    labels, truncated = json.loads(found.labels_and_cut.tobytes())
    classes, known = _number(labels, names)
    if len(known) < 2:
        raise UserError(
            f"{flag} {' '.join(paths)}: all labels are {known[0]!r}; a classifier needs two or more classes"
        )
    return LabelledTexts(found, classes, known, truncated)


@dataclass(frozen=True)
class _Encoded(TokenSequences):
    """Texts as they are kept: with their labels and how many were cut, JSON as uint8."""

    labels_and_cut: np.ndarray


class ClassificationDataset(RowDataset):
    """A `SampleSource` of the chosen texts (None: all), one a row of S places.

    tokens, position_ids int64 [S]; loss_mask bool [S], True at the text's last token alone; labels int64 [S], there the
    class and 0 elsewhere. Padding holds `pad`.
    """

    def __init__(self, texts: LabelledTexts, *, seq_length: int, pad: int, chosen: np.ndarray | None = None):
        rows = Rows.one_each(np.arange(len(texts.classes)) if chosen is None else chosen)
        super().__init__(texts.sequences, rows, seq_length=seq_length, pad=pad, packed=False)
        self.classes = texts.classes

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        text = int(self.rows.order[index])
        begin, end = self.sequences.begins[text : text + 2]
        count = int(end - begin)
        item = {
            "tokens": np.full(self.seq_length, self.pad, dtype=np.int64),
            "labels": np.zeros(self.seq_length, dtype=np.int64),
            "loss_mask": np.zeros(self.seq_length, dtype=bool),
            "position_ids": np.arange(self.seq_length, dtype=np.int64),
        }
        item["tokens"][:count] = self.sequences.tokens[begin:end]
        item["position_ids"][count:] -= count  # the padding is no part of the text
        item["labels"][count - 1] = self.classes[text]
        item["loss_mask"][count - 1] = True
        return item


def build_classification_datasets(
    options: SftOptions, tokenizer: Tokenizer, sizes: tuple[int, int, int], names: Sequence[str] | None = None
) -> tuple[Datasets, tuple[str, ...]]:
    """Training and validation sets of one epoch each, and the classes' names in order.

    options: of which files, validation share, length, seed and cache are used. sizes: samples that the run draws from
    train, valid, test; 0: the set isn't needed. Raises UserError with file and line for data that can't be used.
    """
    pad = next((i for i in (tokenizer.pad, tokenizer.eod) if i is not None), 0)
    length, result = options.seq_length, Datasets()
    read = partial(read_labelled_texts, tokenizer=tokenizer, seq_length=length, cache=options.cache, notes=result.notes)
    texts = valid = read(options.data, "--sft-data", names=names)
    result.notes.append(texts.line("--sft-data"))
    if options.valid_data:
        valid = read(options.valid_data, "--sft-valid-data", names=texts.names)
        result.notes.append(valid.line("--sft-valid-data"))

    def rows(split: str, chosen: np.ndarray) -> RowDataset:
        return ClassificationDataset(texts if split == "train" else valid, seq_length=length, pad=pad, chosen=chosen)

    return add_sets(result, options, texts.sequences, valid.sequences, sizes, rows), texts.names


def check_classification(options: SftOptions, tokenizer: Tokenizer, names: Sequence[str] | None = None) -> list[str]:
    """Problems that the first line of each file shows. Cheap, for the time before process groups exist."""
    encoder = TextEncoder(tokenizer)
    return problems_of_first_lines(options, lambda line: (_encode(line, encoder), _label(line, names)))


def _encode(line: Line, encoder: TextEncoder) -> list[int]:
    if not line.value.keys() >= {"text", "label"}:
        raise line.error(f"text and label are needed; the line's keys: {line.keys}")
    text = line.text("text")
    if not text.strip():
        raise line.error("the text is empty")
    with line.naming():
        ids = encoder.whole(text)
    if not ids:
        raise line.error("the text has no tokens")
    return ids


def _label(line: Line, names: Sequence[str] | None) -> str | int:
    label = line.value["label"]
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise line.error(f"label must be a string or a whole number, not {excerpt(label)}")
    if isinstance(label, str) and not label.strip():
        raise line.error("the label is empty")
    if names is not None and str(label) not in names:
        raise line.error(f"label {excerpt(label)} must be one of {', '.join(names)}")
    return label


def _number(labels: Sequence[str | int], names: Sequence[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each label and the classes' names."""
    found = sorted(set(labels))  # all of one type
    known = tuple(names) if names is not None else tuple(str(label) for label in found)
    places = {name: place for place, name in enumerate(known)}
    return np.array([places[str(label)] for label in labels], dtype=np.int64), known
