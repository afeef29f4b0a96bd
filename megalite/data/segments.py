"""From pieces of text, some of them a model's answers, to token ids that know which of them are answers.

The key idea: ids are those of the whole text wherever a cut between pieces falls between two of its tokens, which is
seen by encoding the text before the cut. Where a token would lie across a cut, the pieces are encoded apart, as they
are in generation, where the prompt is all there is yet. `encode` serves training and generation alike, so that a model
meets the ids that it was taught.

The text of a special token (`<|im_end|>`) is that token where a chat template wrote it, and plain text where a user
did: users' text is written with guards around it (`protect`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from megalite.config.errors import FlagError, UserError
from megalite.data.jsonl import NONCHARACTERS
from megalite.data.tokenizer_base import Tokenizer

# Stand for ids that a tokenizer may not be able to read from a text.
EOD_SIGN, BOS_SIGN = NONCHARACTERS[0], NONCHARACTERS[1]
_SIGNS = re.compile(f"([{EOD_SIGN}{BOS_SIGN}])")
_OPEN, _CLOSE = NONCHARACTERS[4], NONCHARACTERS[5]  # stand around text that is no special token
_GUARDS = re.compile(f"[{_OPEN}{_CLOSE}]")


def unguarded(text: str) -> str:
    """A text as its reader sees it, without the guards of `TextEncoder.protect`."""
    return _GUARDS.sub("", text)


class TextSegment(NamedTuple):
    """A piece of a text. `counted`: it is (part of) an answer, so its tokens are labels that count."""

    text: str
    counted: bool


class EncodedPiece(NamedTuple):
    """The ids of one segment."""

    ids: list[int]
    counted: bool


class TextEncoder:
    """Ids of text without what the tokenizer's own template puts around every text.

    `prefix`: the ids that this template puts first (such as Llama 3's begin of text); usually empty.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.prefix, self._closing = tokenizer.template()
        names = "|".join(re.escape(name) for name in sorted(tokenizer.special, key=len, reverse=True))
        self._names = re.compile(names) if names else None
        self._guarded = re.compile(f"{_OPEN}({names}){_CLOSE}|({names})")

    def protect(self, text: str) -> str:
        """A user's text, in which what looks like a special token is none, but with --parse-special-tokens."""
        if self._names is None or self.tokenizer.parse_special_tokens:
            return text
        return self._names.sub(rf"{_OPEN}\g<0>{_CLOSE}", text)

    def ids(self, text: str) -> list[int]:
        """Ids of a text; the signs become their ids. A UserError where the tokenizer lacks one."""
        result: list[int] = []
        for part in _SIGNS.split(text):
            if part in (EOD_SIGN, BOS_SIGN):
                result.append(self._special(part))
            elif part:
                result += self._ids(part)
        return result

    def stops(self, text: str) -> bool:
        """Whether generation can stop after this text: its last id is one that ordinary text doesn't hold."""
        ids = self.ids(text)
        return bool(ids) and self.tokenizer.is_control(ids[-1])

    def _ids(self, text: str) -> list[int]:
        guarded = _GUARDS.search(text) is not None
        if guarded:
            text = unguarded(self._guarded.sub(lambda found: found[1] or self.tokenizer.marked(found[2]), text))
        (ids,) = self.tokenizer.tokenize_alone([text], special=not guarded)
        return ids

    def whole(self, text: str) -> list[int]:
        """Ids of a user's text inside the tokenizer's own template."""
        return [*self.prefix, *self.ids(self.protect(text)), *self._closing]

    def cut(self, ids: list[int], length: int) -> list[int]:
        """A text's ids, template included, cut to `length`, which is less: the template's stay, the text loses its end.
        A FlagError where the template alone is as long."""
        after = len(self._closing)
        if len(self.prefix) + after >= length:
            raise FlagError(f"--seq-length {length} is too short: the template's special tokens leave no room")
        return [*ids[: length - after], *ids[len(ids) - after :]]

    def encode(self, segments: Sequence[TextSegment]) -> list[EncodedPiece]:
        """The ids of each segment, in order; empty ones left out."""
        segments = [segment for segment in segments if segment.text]
        apart = [self.ids(segment.text) for segment in segments]
        whole = self.ids("".join(segment.text for segment in segments))
        if list(itertools.chain.from_iterable(apart)) != whole:
            apart = self._cut(whole, segments) or apart
        return [EncodedPiece(ids, segment.counted) for ids, segment in zip(apart, segments, strict=True)]

    def _cut(self, whole: list[int], segments: Sequence[TextSegment]) -> list[list[int]] | None:
        """The ids of the whole text, cut between the segments; None where a token lies across a cut."""
        pieces, start, text = [], 0, ""
        for segment in segments[:-1]:
            text += segment.text
            before = self.ids(text)
            if len(before) < start or whole[: len(before)] != before:
                return None
            pieces.append(whole[start : len(before)])
            start = len(before)
        return [*pieces, whole[start:]]

    def _special(self, sign: str) -> int:
        found = self.tokenizer.eod if sign == EOD_SIGN else self.tokenizer.bos
        if found is None:
            role = "end-of-document" if sign == EOD_SIGN else "begin-of-text"
            raise UserError(f"this tokenizer has no {role} id: its files name none")
        return found
