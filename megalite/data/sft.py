"""Supervised fine-tuning: from conversations and prompt-completion pairs in JSON lines to samples of one length.

The key idea: each line becomes token ids of which some are answers, once, when the run starts. All that follows
(validation share, rows, order) is a function of their lengths and the seed, so every rank of every layout sees the same
samples.

A line is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}

with the roles system, user, assistant and tool. `tools` beside `messages` and `tool_calls` in an assistant's message
are handed to the chat template.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megalite.config.errors import FlagError, UserError
from megalite.data.chat_template import Chat, load_chat
from megalite.data.gpt_dataset import Datasets, SplitSummary
from megalite.data.jsonl import Line, read_lines, shown
from megalite.data.packing import RowDataset, Rows, SequenceBuilder, TokenSequences
from megalite.data.segments import EOD_SIGN, EncodedPiece, Segment, TextEncoder
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import require_eod

ROLES = ("system", "user", "assistant", "tool")
NO_SAMPLES = "it has no samples"
LONG_ANSWERS = ("error", "truncate", "drop")


@dataclass(frozen=True)
class SftOptions:
    """Fine-tuning data as the flags have it.

    data, valid_data: JSON-lines files. valid_share: part of `data`, 0 to below 1, that validation gets where there is
    no `valid_data`. packing: several samples a row. long_answers: what becomes of a sample with an answer that has more
    tokens than a row: LONG_ANSWERS. chat_template: see `load_chat`.
    """

    data: Sequence[str]
    seq_length: int
    seed: int
    valid_data: Sequence[str] = ()
    valid_share: float = 0.0
    packing: bool = False
    long_answers: str = "error"
    chat_template: str | None = None


@dataclass(frozen=True)
class ReadReport:
    """What reading some files gave. samples: kept. answer_tokens: of them. truncated: samples cut at the row's end, and
    lost_tokens, the answer tokens that this cost. dropped: samples with no answer token left; dropped_tokens: theirs.
    """

    samples: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0

    def lines(self, name: str, seq_length: int) -> list[str]:
        """For people; about truncation only where there was any."""
        result = [
            f"{name}: {self.samples:,} samples of {self.tokens:,} tokens, {self.answer_tokens:,} of them in answers"
        ]
        if self.truncated:
            result.append(
                f"{name}: {self.truncated:,} samples were cut to --seq-length {seq_length} and lost "
                f"{self.lost_tokens:,} answer tokens"
            )
        if self.dropped:
            result.append(
                f"{name}: {self.dropped:,} samples with {self.dropped_tokens:,} answer tokens were left out: their "
                f"answers don't fit --seq-length {seq_length}"
            )
        return result


def build_sft_datasets(
    options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None, sizes: tuple[int, int, int]
) -> Datasets:
    """Training and validation sets of one epoch each; `notes` say what was read, cut and dropped.

    sizes: samples (rows) that the run draws from train, valid, test, for the summaries; 0: the set isn't needed. The
    loader goes through a set again and again, in another order each time with `--dataloader-type cyclic`.

    Raises UserError with file and line for data that can't be used.
    """
    eod = require_eod(tokenizer, "--sft-data")
    reader = SftReader(options, tokenizer, tokenizer_model)
    result = Datasets()
    pad = eod if tokenizer.pad is None else tokenizer.pad
    data, report = reader.read(options.data, "--sft-data")
    result.notes += report.lines("--sft-data", options.seq_length)
    everything = np.arange(len(data))
    train, held = everything, everything[:0]
    if options.valid_data:
        valid, report = reader.read(options.valid_data, "--sft-valid-data")
        result.notes += report.lines("--sft-valid-data", options.seq_length)
        held = np.arange(len(valid))
    else:
        valid = data
        if options.valid_share:
            train, held = hold_out(len(data), options.valid_share, options.seed)
    if sizes[0]:
        result.train = _rows(options, data, train, pad)
        result.summaries.append(_summary("train", options.data, result.train, sizes[0]))
        result.notes.append(_filling("train", result.train))
    if sizes[1] and len(held):
        result.valid = _rows(options, valid, held, pad)
        result.summaries.append(_summary("valid", options.valid_data or options.data, result.valid, sizes[1]))
        result.notes.append(_filling("valid", result.valid))
    return result


def check_sft(options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None) -> list[str]:
    """Problems that the first line of each file shows: missing files, wrong keys, no chat template, no EOS. Cheap, for
    the time before process groups exist."""
    problems = []
    reader = SftReader(options, tokenizer, tokenizer_model)
    if options.chat_template is not None:
        try:
            reader.chat  # noqa: B018 (loads it, whether or not the first lines need it)
        except UserError as error:
            return [str(error)]
    for flag, paths in (("--sft-data", options.data), ("--sft-valid-data", options.valid_data)):
        found = False
        for path in paths:
            try:
                require_eod(tokenizer, flag)
                for line in itertools.islice(read_lines(path, flag), 1):
                    found = True
                    reader.fits(line, reader.encode(line))
            except UserError as error:
                found = True
                problems.append(str(error))
        if paths and not found:
            problems.append(f"{flag} {' '.join(paths)}: {NO_SAMPLES}")
    if not 0 <= options.valid_share < 1:
        problems.append(f"--sft-valid-share {options.valid_share} must lie between 0 and 1")
    if options.valid_share and options.valid_data:
        problems.append("--sft-valid-share and --sft-valid-data exclude each other")
    return list(dict.fromkeys(problems))


def hold_out(samples: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample numbers for training and for validation, each ascending, at least one of each. The seed alone chooses."""
    if not 0 < share < 1:
        raise FlagError(f"--sft-valid-share {share} must lie between 0 and 1")
    if samples < 2:
        raise UserError(f"--sft-valid-share {share}: there is only {samples} sample to divide")
    count = min(max(1, round(samples * share)), samples - 1)
    order = _permutation(samples, seed, "validation")
    return np.sort(order[count:]), np.sort(order[:count])


class SftReader:
    """Lines to token sequences. The chat template is loaded when the first conversation comes."""

    def __init__(self, options: SftOptions, tokenizer: Tokenizer, tokenizer_model: str | None):
        self.options, self.tokenizer, self.tokenizer_model = options, tokenizer, tokenizer_model
        self.encoder = TextEncoder(tokenizer)

    @functools.cached_property
    def chat(self) -> Chat:
        return load_chat(self.options.chat_template, self.tokenizer, self.tokenizer_model)

    def read(self, paths: Sequence[str], flag: str) -> tuple[TokenSequences, ReadReport]:
        """The samples of some files, in order. Raises UserError where none is left."""
        builder, report = SequenceBuilder(), ReadReport()
        for path in paths:
            for line in read_lines(path, flag):
                report = self._add(line, builder, report)
        if not report.samples:
            why = f"none of its {report.dropped} samples fits --seq-length" if report.dropped else NO_SAMPLES
            raise UserError(f"{flag} {' '.join(paths)}: {why}")
        return builder.build(), report

    def _add(self, line: Line, builder: SequenceBuilder, report: ReadReport) -> ReadReport:
        pieces = self.encode(line)
        ids = [i for piece in pieces for i in piece.ids]
        counted = [piece.counted for piece in pieces for _ in piece.ids]
        answers = sum(counted[1:])
        kept = self._kept(line, pieces, counted)
        if not kept:
            return replace(report, dropped=report.dropped + 1, dropped_tokens=report.dropped_tokens + answers)
        builder.add(ids[:kept], counted[:kept])
        left = sum(counted[1:kept])
        return replace(
            report,
            samples=report.samples + 1,
            tokens=report.tokens + kept,
            answer_tokens=report.answer_tokens + left,
            truncated=report.truncated + (left < answers),
            lost_tokens=report.lost_tokens + answers - left,
        )

    def fits(self, line: Line, pieces: Sequence[EncodedPiece]) -> bool:
        """Whether each answer fits a row, or may be cut. A UserError where none may be longer."""
        room = self.options.seq_length
        longest = max((len(piece.ids) for piece in pieces if piece.counted), default=0)
        if longest > room and self.options.long_answers == "error":
            raise line.error(
                f"an answer has {longest} tokens, more than --seq-length {room}: raise it, shorten the answer, or "
                "give --sft-long-answers truncate or drop"
            )
        return longest <= room or self.options.long_answers == "truncate"

    def _kept(self, line: Line, pieces: Sequence[EncodedPiece], counted: Sequence[bool]) -> int:
        """Tokens of a sample that stay: up to the last answer token in the row; 0 where none is."""
        if not self.fits(line, pieces):
            return 0
        last = self.options.seq_length  # a row of S places holds S + 1 tokens
        while last > 0 and (last >= len(counted) or not counted[last]):
            last = min(last, len(counted)) - 1
        return last + 1 if last > 0 else 0

    def encode(self, line: Line) -> list[EncodedPiece]:
        """The ids of a line, context and answers apart, ending with an answer. Raises UserError with file and line."""
        try:
            if {"messages", "prompt", "completion"} <= line.value.keys():
                raise line.error("it has messages and also prompt and completion: leave one of the two forms out")
            if "messages" in line.value:
                pieces = self.encoder.encode(self._conversation(line))
            else:
                prompt, completion = map(self.encoder.protect, _pair(line))
                pieces = self.encoder.encode([Segment(prompt, False), Segment(completion + EOD_SIGN, True)])
                pieces.insert(0, EncodedPiece(self.encoder.prefix, False))
        except FlagError:
            raise
        except UserError as error:
            place = f"{line.path}:{line.number}: "
            raise error if str(error).startswith(place) else line.error(str(error)) from None
        return pieces

    def _conversation(self, line: Line) -> list[Segment]:
        messages, tools = line.value["messages"], line.value.get("tools")
        if not isinstance(messages, list) or not messages:
            raise line.error(f"messages must be a list of objects with role and content, not {shown(messages)}")
        if tools is not None and not isinstance(tools, list):
            raise line.error(f"tools must be a list, not {shown(tools)}")
        for number, message in enumerate(messages, start=1):
            _check_message(line, number, message)
        return self.chat.template.segments(messages, tools=tools)


def _check_message(line: Line, number: int, message: Any) -> None:
    if not isinstance(message, dict):
        raise line.error(f"message {number} must be an object with role and content, not {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        problem = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise line.error(f"message {number} {problem}; known are {', '.join(ROLES)}")
    calls = role == "assistant" and message.get("tool_calls")
    if calls and content is None:
        return
    if not isinstance(content, str):
        raise line.error(f"the content of message {number} ({role}) must be a string, not {shown(content)}")
    if role == "assistant" and not calls and not content.strip():
        raise line.error(f"message {number} is an empty answer")


def _pair(line: Line) -> tuple[str, str]:
    values = []
    for key in ("prompt", "completion"):
        if key not in line.value:
            there = ", ".join(list(line.value)[:8]) or "none"
            hint = "; labels are for --task classification" if "label" in line.value else ""
            raise line.error(f"messages, or prompt and completion, are needed; the line's keys: {there}{hint}")
        if not isinstance(line.value[key], str):
            raise line.error(f"{key} must be a string, not {shown(line.value[key])}")
        values.append(line.value[key])
    if not values[1].strip():
        raise line.error("the completion is empty")
    return values[0], values[1]


def _rows(options: SftOptions, data: TokenSequences, chosen: np.ndarray, pad: int) -> RowDataset:
    if options.packing:
        # Mixed first: what stands together in a file is often alike, and packs of one kind are poor batches.
        chosen = chosen[_permutation(len(chosen), options.seed, "packing")]
        rows = Rows.best_fit(chosen, data.lengths[chosen] - 1, options.seq_length)
    else:
        rows = Rows.one_each(chosen)
    return RowDataset(data, rows, seq_length=options.seq_length, pad=pad, packed=options.packing)


def _filling(split: str, rows: RowDataset) -> str:
    taken = rows.sequences.lengths[rows.rows.order] - 1
    share = taken.sum() / (len(rows) * rows.seq_length)
    if rows.packed:
        return f"{split}: {len(taken):,} samples packed into {len(rows):,} rows, {share:.1%} of whose places are taken"
    return f"{split}: not packed; a sample takes {share:.1%} of a row, the longest {taken.max() / rows.seq_length:.1%}"


def _summary(split: str, files: Sequence[str], rows: RowDataset, drawn: int) -> SplitSummary:
    return SplitSummary(
        split=split,
        prefix=" ".join(files),
        documents=len(rows.rows.order),
        tokens_per_epoch=int(rows.sequences.lengths[rows.rows.order].sum()),
        samples_per_epoch=len(rows),
        samples=drawn,
        epochs=drawn / len(rows),
    )


def _permutation(size: int, seed: int, use: str) -> np.ndarray:
    """A permutation by seed and use. RandomState: numpy promises that its permutations never change."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, *use.encode()]))
    return np.random.RandomState(bits).permutation(size)
