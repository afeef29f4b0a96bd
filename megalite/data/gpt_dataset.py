"""GPT samples from token files: train, valid and test sets made from the flags, sample for sample as megatron-core.

The key idea: a dataset is a pure function of a sample's number. Which tokens sample i has follows from the index
arrays of `sample_index` (and for a blend from `blend`); no state moves while training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.blend import BlendedDataset, ConcatDataset, member_sizes, normalize
from megalite.data.document_mask import Item, SampleFormat, SampleSource
from megalite.data.indexed_dataset import IndexedDataset, bin_path
from megalite.data.mock import SAMPLES_OF_WHOLE_SPLIT, MockDataset
from megalite.data.remote_files import local_prefix
from megalite.data.sample_index import EMPTY_INDEX, SampleIndex, load_or_build_index, samples_in
from megalite.data.splits import NOTHING_TO_TRAIN_ON, SplitSource, split_sources

# Tokens of each file that are compared with the vocabulary before training starts.
_SCANNED_TOKENS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class GPTDataset:
    """Samples of S tokens from a range of a corpus's documents. Items as `SampleFormat.item` makes them.

    documents, tokens_per_epoch: of the range. vocab_size: ids in the vocabulary; a sample with another id raises
    UserError when it is read.
    """

    corpus: IndexedDataset
    index: SampleIndex
    documents: int
    tokens_per_epoch: int
    seq_length: int
    vocab_size: int
    format: SampleFormat

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Item:
        return self.format.item(*self._read(index))

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The S + 1 token ids of a sample, int64; and which of them begin a document of the corpus, bool."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        cut = int(self.index.shuffle_index[index])
        place, offset = (int(value) for value in self.index.sample_index[cut])
        text = np.empty(self.seq_length + 1, dtype=np.int64)
        first = np.zeros(self.seq_length + 1, dtype=bool)
        filled = 0
        while filled < len(text):
            document = int(self.index.document_index[place])
            available = int(self.corpus.sequence_lengths[document]) - offset
            count = min(available, len(text) - filled)
            text[filled : filled + count] = self.corpus.get(document, offset, count)
            first[filled : filled + 1] |= offset == 0 and count > 0
            filled, place, offset = filled + count, place + 1, 0
        check_vocabulary(text, self.vocab_size, self.corpus.prefix)
        return text, first


def check_vocabulary(tokens: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise UserError where a token id lies outside 0 .. vocab_size - 1."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(
            f"{bin_path(prefix)} holds token id {bad}, but the vocabulary has {vocab_size} entries; "
            f"it was made with another tokenizer than --tokenizer-type, --tokenizer-model or --vocab-size name"
        )


@dataclass(frozen=True)
class SplitSummary:
    """What one corpus gives to one split. `samples`: drawn from it in the whole run. `whole`: once at each
    evaluation."""

    split: str
    prefix: str
    documents: int
    tokens_per_epoch: int
    samples_per_epoch: int
    samples: int
    epochs: float
    whole: bool = False

    def line(self) -> str:
        """One line for people."""
        held = (
            f"{self.split}: {self.prefix}: {self.documents:,} documents, {self.tokens_per_epoch:,} tokens and "
            f"{self.samples_per_epoch:,} samples per epoch"
        )
        if self.whole:
            return f"{held}; each evaluation reads all of them once"
        repeated = " (data is repeated)" if self.epochs > 1 else ""
        return f"{held}; this run uses {self.samples:,} samples = {self.epochs:.2f} epochs{repeated}"


@dataclass
class Datasets:
    """The three sets, None where a split has or needs no data; what they hold; notes for the user; and
    whether answers in conversations are trained."""

    train: SampleSource | None = None
    valid: SampleSource | None = None
    test: SampleSource | None = None
    summaries: list[SplitSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conversations: bool = False


def build_datasets(config: RunConfig, eod: int, vocab_size: int, sizes: tuple[int, int, int]) -> Datasets:
    """The sets of a run, from its data flags.

    eod: id of the end of document. vocab_size: entries of the vocabulary, EOD counted. sizes: samples wanted from
    train, valid and test (`splits.split_sizes`); 0: none. With --full-validation valid and test are the whole split
    once, last partial sequence dropped, however many are wanted. Every process may call it at the same time.

    Raises UserError naming the flag or file where the data can't give what is wanted.
    """
    train, *others = sizes
    wanted = (train, *(None if size and config.validation.full_validation else size for size in others))
    result = Datasets()
    if config.data.mock_data:
        sets = [_mock(config, eod, vocab_size, split, size) if size != 0 else None for split, size in enumerate(wanted)]
    else:
        builder = _Builder(config, eod, vocab_size, result)
        sources = split_sources(config.data)
        if train and sources[0] is None:
            raise UserError(NOTHING_TO_TRAIN_ON)
        sets = [
            builder.split(source, size) if source and size != 0 else None
            for source, size in zip(sources, wanted, strict=True)
        ]
    result.train, result.valid, result.test = sets
    return result


def _format(config: RunConfig, eod: int) -> SampleFormat:
    data = config.data
    return SampleFormat(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def _mock(config: RunConfig, eod: int, vocab_size: int, split: int, size: int | None) -> SampleSource:
    assert config.data.seq_length is not None
    return MockDataset(
        seed=config.training.seed,
        split=split,
        vocab_size=vocab_size,
        seq_length=config.data.seq_length,
        num_samples=SAMPLES_OF_WHOLE_SPLIT if size is None else size,
        sample_format=_format(config, eod),
    )


class _Builder:
    """Builds the splits of one run; opens every pair of files once."""

    def __init__(self, config: RunConfig, eod: int, vocab_size: int, result: Datasets) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.result = result
        self.format = _format(config, eod)
        assert config.data.seq_length is not None
        self.seq_length = config.data.seq_length
        self._corpora: dict[str, IndexedDataset] = {}

    def split(self, source: SplitSource, size: int | None) -> SampleSource:
        """One split with at least `size` samples; None: each member's whole part once."""
        prefixes, weights = source.blend.prefixes, source.blend.weights
        # megatron-core blends a single weighted --data-path with itself, which changes its size and so its shuffle.
        alone = len(prefixes) == 1 and (weights is None or source.own_path)
        if size is None or alone:
            members = [self._member(source, prefix, size) for prefix in prefixes]
            self._summarise(source, members, [len(member) if size is None else size for member in members])
            return members[0] if alone else ConcatDataset(members)
        if weights is None:
            members, shares, size = self._by_size(source, size)
        else:
            shares = normalize(weights)
            drawn, built = member_sizes(size, shares)
            members = [self._member(source, prefix, count) for prefix, count in zip(prefixes, built, strict=True)]
            self._summarise(source, members, drawn)
            size = sum(drawn)
        return BlendedDataset(members, shares, size, self._folder(prefixes[0]), self.result.notes)

    def _by_size(self, source: SplitSource, size: int) -> tuple[list[GPTDataset], list[float], int]:
        """Members, weights and size of prefixes alone: one epoch of each, weighted by its samples, no more samples than
        there are."""
        members = [self._member(source, prefix, None, may_be_short=True) for prefix in source.blend.prefixes]
        available = sum(len(member) for member in members)
        if not available:
            raise UserError(
                f"{source.blend.flag}: no corpus has the --seq-length + 1 = {self.seq_length + 1} tokens that one "
                f"sample of {source.name} needs"
            )
        if size > available:
            self.result.notes.append(
                f"{source.name}: {source.blend.flag} without weights gives {available:,} samples; "
                f"the run needs {size:,}, so it repeats them in the same order"
            )
        self._summarise(source, members, [round(size * len(member) / available) for member in members])
        members = [member for member in members if len(member)]
        return members, [len(member) for member in members], min(size, available)

    def _folder(self, prefix: str) -> str:
        return self.config.data.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(prefix)), "cache")

    def _corpus(self, prefix: str) -> IndexedDataset:
        if prefix not in self._corpora:
            local = local_prefix(prefix, self.config.data.data_cache_path)
            corpus = IndexedDataset(local, self.config.data.mmap_bin_files)
            if corpus.dtype.kind not in "iu":
                raise UserError(f"{prefix}.idx holds {corpus.dtype.name} values, which can't be token ids")
            # So that a wrong tokenizer shows before step one.
            first = np.fromfile(bin_path(local), corpus.dtype, _SCANNED_TOKENS)
            check_vocabulary(first, self.vocab_size, prefix)
            self._corpora[prefix] = corpus
        return self._corpora[prefix]

    def _member(self, source: SplitSource, prefix: str, size: int | None, may_be_short: bool = False) -> GPTDataset:
        """This split's part of one corpus, with at least `size` samples; None: one epoch."""
        corpus = self._corpus(prefix)
        first, last = source.documents(len(corpus))
        tokens = int(corpus.sequence_lengths[first:last].sum(dtype=np.int64))
        if not may_be_short:
            self._check_enough(source, corpus, tokens, size)
        if tokens == 0:
            index = EMPTY_INDEX
        else:
            index = load_or_build_index(
                corpus.sequence_lengths,
                first,
                last,
                num_samples=size,
                seq_length=self.seq_length,
                seed=self.config.training.seed,
                folder=self._folder(prefix),
                label=f"{os.path.basename(prefix)}-{source.name}",
                notes=self.result.notes,
            )
        return GPTDataset(
            corpus=corpus,
            index=index,
            documents=last - first,
            tokens_per_epoch=tokens,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            format=self.format,
        )

    def _check_enough(self, source: SplitSource, corpus: IndexedDataset, tokens: int, size: int | None) -> None:
        first, last = source.documents(len(corpus))
        if first >= last:
            problem = f"is empty: {source.described} gives it none of {len(corpus)} documents"
        elif tokens == 0:
            problem = f"has no tokens: its {last - first} of {len(corpus)} documents are empty ({source.described})"
        elif size is None and samples_in(tokens, self.seq_length) == 0:
            problem = f"has {tokens} tokens, and one sample needs --seq-length + 1 = {self.seq_length + 1}"
        else:
            return
        remedy = "give it a larger share or more data"
        if source.name != "train":
            remedy += ", a share of 0 in --split, or --eval-iters 0" if not source.own_path else ", or --eval-iters 0"
        raise UserError(f"the {source.name} split of {corpus.prefix} {problem}; {remedy}")

    def _summarise(self, source: SplitSource, members: Sequence[GPTDataset], drawn: Sequence[int]) -> None:
        for member, samples in zip(members, drawn, strict=True):
            summary = SplitSummary(
                split=source.name,
                prefix=member.corpus.prefix,
                documents=member.documents,
                tokens_per_epoch=member.tokens_per_epoch,
                samples_per_epoch=samples_in(member.tokens_per_epoch, self.seq_length),
                samples=samples,
                epochs=samples * self.seq_length / max(1, member.tokens_per_epoch),
            )
            self.result.summaries.append(summary)
