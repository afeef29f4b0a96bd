"""Supervised fine-tuning: from conversations and prompt-completion pairs in JSON lines to samples of one length.

The key idea: each line becomes token ids of which some are answers, once, when the run starts. All that follows
(validation share, rows, order) is a function of their lengths and the seed, so every rank of every layout sees the same
samples.

The forms of a line are in `chat_forms`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from megalite.config.errors import UserError
from megalite.data.cache import SampleCache
from megalite.data.chat_forms import PAIR, conversation_of, form_of, pair_of
from megalite.data.chat_template import Chat, load_chat
from megalite.data.gpt_dataset import Datasets, SplitSummary
from megalite.data.jsonl import Line, Progress, read_lines
from megalite.data.packing import RowDataset, Rows, SequenceBuilder, TokenSequences
from megalite.data.sampler import fixed_permutation
from megalite.data.segments import EOD_SIGN, EncodedPiece, TextEncoder, TextSegment
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import require_eod

NO_SAMPLES = "it has no samples"
LONG_ANSWERS = ("error", "truncate", "drop")


@dataclass(frozen=True)
class SftOptions:
    """Fine-tuning data as the flags have it.

    data, valid_data: JSON-lines files. valid_share: part of `data`, 0 to below 1, that validation gets where there is
    no `valid_data`. packing: several samples a row. long_answers: what becomes of a sample whose answers don't all lie
    within a row: LONG_ANSWERS. chat_template: see `load_chat`. cache: where samples are kept; None: nowhere.
    """

    data: Sequence[str]
    seq_length: int
    seed: int
    valid_data: Sequence[str] = ()
    valid_share: float = 0.0
    packing: bool = False
    long_answers: str = "error"
    chat_template: str | None = None
    cache: SampleCache | None = None


@dataclass
class ReadReport:
    """What reading some files gave. samples: kept. answer_tokens: of them. truncated: samples cut at the row's end, and
    lost_tokens, the answer tokens that this cost. dropped: samples with no answer token left; dropped_tokens: theirs.
    empty: lines without an answer. split: lines that became several samples. conversations: lines that aren't pairs.
    """

    samples: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    empty: int = 0
    split: int = 0
    conversations: int = 0

    def lines(self, name: str, seq_length: int) -> list[str]:
        """For people; about what was cut or divided only where there was any."""
        result = [
            f"{name}: {self.samples:,} samples of {self.tokens:,} tokens, {self.answer_tokens:,} of them in answers"
        ]
        if self.split:
            result.append(
                f"{name}: {self.split:,} conversations became several samples, because the chat template changes "
                "earlier answers when later turns follow, or writes no end of turn: each answer is trained on the "
                "text that the template gives at its own turn"
            )
        if self.empty:
            result.append(f"{name}: {self.empty:,} lines with an empty output were left out")
        if self.truncated:
            result.append(
                f"{name}: {self.truncated:,} samples were cut to --seq-length {seq_length} and lost "
                f"{self.lost_tokens:,} answer tokens"
            )
        if self.dropped:
            result.append(
                f"{name}: {self.dropped:,} samples with {self.dropped_tokens:,} answer tokens were left out: they "
                f"don't fit --seq-length {seq_length}"
            )
        return result


@dataclass(frozen=True)
class SftSamples(TokenSequences):
    """Samples, and the fields of the `ReadReport` on them, int64."""

    report: np.ndarray

    def counts(self) -> ReadReport:
        """What reading them gave."""
        return ReadReport(*self.report.tolist())


def build_sft_datasets(
    options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None, sizes: tuple[int, int, int]
) -> Datasets:
    """Training and validation sets of one epoch each; `notes` say what was read, cut and dropped.

    sizes: samples (rows) that the run draws from train, valid, test, for the summaries; 0: the set isn't needed. The
    loader goes through a set again and again, in another order each time with `--dataloader-type cyclic`.

    Raises UserError with file and line for data that can't be used.
    """
    eod = require_eod(tokenizer, "--sft-data")
    reader, result = SftReader(options, tokenizer, tokenizer_model), Datasets()
    pad = eod if tokenizer.pad is None else tokenizer.pad
    data = valid = _read(reader, options.data, "--sft-data", result.notes)
    result.conversations = data.counts().conversations > 0
    if options.valid_data:
        valid = _read(reader, options.valid_data, "--sft-valid-data", result.notes)

    def rows(split: str, chosen: np.ndarray) -> RowDataset:
        found = _rows(options, data if split == "train" else valid, chosen, pad)
        result.notes.append(_filling(split, found))
        return found

    return add_sets(result, options, data, valid, sizes, rows)


def _read(reader: SftReader, paths: Sequence[str], flag: str, notes: list[str]) -> SftSamples:
    """As `SftReader.read`, from the cache where it is there. `notes` get the report."""
    options = reader.options
    build = functools.partial(reader.read, paths, flag)
    key = {"seq_length": options.seq_length, "long_answers": options.long_answers, "template": reader.template()}
    cache = options.cache
    samples = build() if cache is None else cache.samples(SftSamples, reader.tokenizer, paths, key, build, notes)
    notes += samples.counts().lines(flag, options.seq_length)
    return samples


def add_sets(
    result: Datasets,
    options: SftOptions,
    data: TokenSequences,
    valid: TokenSequences,
    sizes: tuple[int, int, int],
    rows: Callable[[str, np.ndarray], RowDataset],
) -> Datasets:
    """Put the sets that are needed, made by `rows` of a split's name and the chosen samples, into `result`."""
    train, held = divide(options, data, valid)
    if sizes[0]:
        result.train = found = rows("train", train)
        result.summaries.append(_summary("train", options.data, found, sizes[0]))
    if sizes[1] and len(held):
        result.valid = found = rows("valid", held)
        result.summaries.append(_summary("valid", options.valid_data or options.data, found, sizes[1]))
    return result


def check_sft(options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None) -> list[str]:
    """Problems that the first line of each file shows: missing files, wrong keys, no chat template, no EOS. Cheap, for
    the time before process groups exist."""
    reader = SftReader(options, tokenizer, tokenizer_model)
    try:
        require_eod(tokenizer, "--sft-data")
        if options.chat_template is not None:
            reader.chat  # noqa: B018 (loads it, whether or not the first lines need it)
    except UserError as error:
        return [str(error)]
    return problems_of_first_lines(options, reader.check)


def problems_of_first_lines(options: SftOptions, read: Callable[[Line], object]) -> list[str]:
    """What `read` finds wrong with the first line of each file, and files that can't be read or hold no line."""
    problems = []
    for flag, paths in (("--sft-data", options.data), ("--sft-valid-data", options.valid_data)):
        found = False
        for path in paths:
            try:
                for line in itertools.islice(read_lines(path, flag), 1):
                    found = True
                    read(line)
            except UserError as error:
                found = True
                problems.append(str(error))
        if paths and not found:
            problems.append(f"{flag} {' '.join(paths)}: {NO_SAMPLES}")
    return list(dict.fromkeys(problems))


def divide(options: SftOptions, data: TokenSequences, valid: TokenSequences) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the samples in `data` to train on and of those in `valid` to validate on; no line is in both."""
    everything = np.arange(len(data))
    if options.valid_data:
        return everything, np.arange(len(valid))
    if not options.valid_share:
        return everything, everything[:0]
    lines, of_line = np.unique(data.origins, return_inverse=True)
    chosen, _ = hold_out(len(lines), options.valid_share, options.seed)
    is_train = np.isin(of_line, chosen)
    return np.flatnonzero(is_train), np.flatnonzero(~is_train)


def hold_out(samples: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample numbers for training and for validation, each ascending, at least one of each. The seed alone chooses."""
    if samples < 2:
        raise UserError(f"--sft-valid-share {share}: there is only {samples} sample to divide")
    count = min(max(1, round(samples * share)), samples - 1)
    order = fixed_permutation(samples, [seed, *b"validation"])
    return np.sort(order[count:]), np.sort(order[:count])


class SftReader:
    """Lines to token sequences. The chat template is loaded when the first conversation comes."""

    def __init__(self, options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None):
        self.options, self.tokenizer, self.tokenizer_model = options, tokenizer, tokenizer_model
        self.encoder = TextEncoder(tokenizer)

    @functools.cached_property
    def chat(self) -> Chat:
        return load_chat(self.options.chat_template, self.tokenizer, self.tokenizer_model)

    def template(self) -> list[Any]:
        """All of the chat template that samples depend on; nothing where there is none, as for pairs alone."""
        try:
            chat = self.chat.template
        except UserError:
            return []
        return [chat.source, chat.variables]

    def read(self, paths: Sequence[str], flag: str, progress: Progress | None = None) -> SftSamples:
        """The samples of some files, in order. Raises UserError where none is left."""
        builder, report = SequenceBuilder(), ReadReport()
        for number, line in enumerate(line for path in paths for line in read_lines(path, flag, progress)):
            samples = self.encode(line)
            report.empty += not samples
            report.split += len(samples) > 1
            report.conversations += form_of(line) != PAIR
            for pieces in samples:
                self._add(line, number, pieces, builder, report)
        if not report.samples:
            why = f"none of its {report.dropped} samples fits --seq-length" if report.dropped else NO_SAMPLES
            raise UserError(f"{flag} {' '.join(paths)}: {why}")
        return SftSamples(**vars(builder.build()), report=np.array(astuple(report), dtype=np.int64))

    def _add(
        self, line: Line, number: int, pieces: Sequence[EncodedPiece], builder: SequenceBuilder, report: ReadReport
    ) -> None:
        ids = [i for piece in pieces for i in piece.ids]
        counted = [piece.counted for piece in pieces for _ in piece.ids]
        answers, kept = sum(counted[1:]), self.kept(line, counted)
        if not kept:
            report.dropped += 1
            report.dropped_tokens += answers
            return
        builder.add(ids[:kept], counted[:kept], number)
        left = sum(counted[1:kept])
        report.samples += 1
        report.tokens += kept
        report.answer_tokens += left
        report.truncated += left < answers
        report.lost_tokens += answers - left

    def kept(self, line: Line, counted: Sequence[bool]) -> int:
        """Tokens of a sample that stay: up to the last answer token in the row, 0 if none stays. `counted`: which are
        in answers. A UserError where answers don't fit and none may be cut or dropped."""
        room = self.options.seq_length + 1  # the last token is only a label
        answers = [place for place, counts in enumerate(counted) if counts and place > 0]
        fitting = [place for place in answers if place < room]
        if len(fitting) < len(answers):
            if self.options.long_answers == "error":
                raise line.error(
                    f"the sample has {answers[-1] + 1} tokens, {sum(counted)} of them in answers, but --seq-length "
                    f"{self.options.seq_length} allows {room}: raise it, shorten the sample, or give "
                    "--sft-long-answers truncate or drop"
                )
            if self.options.long_answers == "drop":
                return 0
        return fitting[-1] + 1 if fitting else 0

    def check(self, line: Line) -> None:
        """Raise UserError where a line can't be used."""
        for pieces in self.encode(line):
            self.kept(line, [piece.counted for piece in pieces for _ in piece.ids])

    def encode(self, line: Line) -> list[list[EncodedPiece]]:
        """The samples of a line: ids of context and answers apart, each sample ending with an answer. One, or several
        where the chat template gives some answers another context than later ones see; none where the line has no
        answer and needn't. Raises UserError with file and line."""
        with line.naming():
            form = form_of(line)
            if form != PAIR:
                found = conversation_of(line, form, self.chat.template)
                if found is None:
                    return []
                samples = self.chat.template.samples(found.messages, tools=found.tools, trained=found.trained)
                return [self.chat.encoder.encode(segments) for segments in samples]
            prompt, completion = map(self.encoder.protect, pair_of(line))
            pieces = self.encoder.encode([TextSegment(prompt, False), TextSegment(completion + EOD_SIGN, True)])
            return [[EncodedPiece(self.encoder.prefix, False), *pieces]]

    def prompt(self, text: str, form: str) -> list[int]:
        """The ids after which a model that learns from lines of this form answers `text`."""
        if form == PAIR:
            return [*self.encoder.prefix, *self.encoder.ids(self.encoder.protect(text))]
        return self.chat.prompt([{"role": "user", "content": text}])


def _rows(options: SftOptions, data: TokenSequences, chosen: np.ndarray, pad: int) -> RowDataset:
    if options.packing:
        # Mixed first: what stands together in a file is often alike, and packs of one kind are poor batches.
        chosen = chosen[fixed_permutation(len(chosen), [options.seed, *b"packing"])]
        rows = Rows.best_fit(chosen, data.lengths[chosen] - 1, options.seq_length)
    else:
        rows = Rows.one_each(chosen)
    return RowDataset(data, rows, seq_length=options.seq_length, pad=pad, packed=options.packing)


def _filling(split: str, rows: RowDataset) -> str:
    taken = rows.sequences.lengths[rows.rows.order] - 1
    share = taken.sum() / (len(rows) * rows.seq_length)
    if rows.packed:
        return f"{split}: {len(taken):,} samples packed into {len(rows):,} rows, which are {share:.1%} full"
    return f"{split}: not packed; samples fill {share:.1%} of a row, the longest {taken.max() / rows.seq_length:.1%}"


def _summary(split: str, files: Sequence[str], rows: RowDataset, drawn: int) -> SplitSummary:
    """Of a set of which the run draws so many rows."""
    return SplitSummary(
        split=split,
        prefix=" ".join(files),
        documents=len(rows.rows.order),
        tokens_per_epoch=int(rows.sequences.lengths[rows.rows.order].sum()),
        samples_per_epoch=len(rows),
        samples=drawn,
        epochs=drawn / len(rows),
    )
