"""Generation from text to text.

Key idea: the text of new tokens is what they add to the prompt's text. Decoded on their own they could lose the blank
that joins the two, or a character whose first bytes the prompt holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from megalite.config.errors import UserError
from megalite.data.jsonl import NONCHARACTERS
from megalite.data.tokenizer_base import IncrementalDetokenizer, Tokenizer
from megalite.inference.generate import stream
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions


class StopStrings:
    """Lets a growing text through up to the first of some strings. What may be the beginning of one is held back."""

    def __init__(self, strings: Sequence[str] = ()):
        assert all(strings), "an empty string would stop everything"
        self.strings = tuple(strings)
        self.found = False
        self._held = ""

    def add(self, text: str) -> str:
        """What of the text so far has become certain."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in (text.find(one) for one in self.strings) if place >= 0]
        self.found = bool(places)
        end = min(places) if places else len(text) - self._beginning(text)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        return "" if self.found else self._held

    def _beginning(self, text: str) -> int:
        """Characters at the end of `text` that begin one of the strings."""
        lengths = (n for one in self.strings for n in range(1, len(one)) if text.endswith(one[:n]))
        return max(lengths, default=0)


class Continuation:
    """What the model writes after one prompt, as it grows.

    `text` ends before a stop string, and `tokens` before an id that ends a text. `finish`: "stop" where one of these
    came, "length" where the limit of `limit` tokens did, None while it goes on.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], limit: int, stop_strings: Sequence[str] = ()):
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._limit = limit
        self._decoder = IncrementalDetokenizer(tokenizer, prompt)
        self._stop = StopStrings(stop_strings)

    def add(self, token: int | None) -> str:
        """The text that becomes known by the next id; None: the text has ended."""
        if self.finish is not None:
            return ""
        new = ""
        if token is not None:
            self.tokens.append(token)
            new = self._stop.add(self._decoder.add(token))
        if token is None or self._stop.found or len(self.tokens) == self._limit:
            new += self._stop.add(self._decoder.flush()) + self._stop.flush()
            self.finish = "stop" if token is None or self._stop.found else "length"
        self.text += new
        return new


class Writing:
    """The continuations of some prompts (ids), which grow while it is iterated.

    Each item holds what has become known of each prompt's text, perhaps nothing. `stop`: ids that end a text;
    `stop_strings`: texts that do. `indices` and `check`: see `stream`. Raises a UserError where a prompt is too long.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        *,
        stop: Collection[int],
        stop_strings: Sequence[str] = (),
        indices: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ):
        limit = options.max_new_tokens
        self.results = [Continuation(loaded.tokenizer, prompt, limit, stop_strings) for prompt in prompts]
        self._steps = stream(
            loaded.model, prompts, options, stop=stop, unknown=loaded.unknown, indices=indices, check=check
        )

    def __iter__(self) -> Iterator[list[str]]:
        for step in self._steps:
            yield [result.add(token) for result, token in zip(self.results, step, strict=True)]
            if all(result.finish is not None for result in self.results):
                return
        yield [result.add(None) for result in self.results]

    @property
    def tokens(self) -> int:
        """New ids of all prompts so far."""
        return sum(len(result.tokens) for result in self.results)


class TooLongError(UserError):
    """A text can't fit into the model's context."""


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, most: int | None = None) -> list[list[int]]:
    """Ids of each prompt, as the tokenizer gives them. `most`: characters of each, see `check_characters`.

    A prompt without ids starts from the end-of-document id, after which documents begin in training, or from the
    tokenizer's begin id where it has no other; a UserError where it has neither.
    """
    check_text(prompts)
    check_characters(prompts, most)
    start = tokenizer.bos if tokenizer.eod is None else tokenizer.eod
    result = []
    for number, ids in enumerate(tokenizer.tokenize_batch(prompts), start=1):
        if not ids and start is None:
            raise UserError(f"prompt {number} is empty, and this tokenizer has no id to start from: give it some text")
        result.append(ids or [start])  # type: ignore[list-item]
    return result


def check_text(texts: Sequence[str], what: str = "prompt", *, signs: bool = False) -> None:
    """A UserError where a text holds half a character: a lone surrogate, as a broken command line does. `signs`: also
    where it holds a code point that is no character, since the encoder of conversations uses such."""
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what} {number} is not valid UTF-8") from None
        if signs and (found := next((sign for sign in NONCHARACTERS if sign in text), None)):
            raise UserError(f"{what} {number} holds U+{ord(found):04X}, which is not a character")


def check_characters(texts: Sequence[str], most: int | None) -> None:
    """A TooLongError, before a tokenizer's work on it, where a text has more than `most` characters."""
    longest = max(map(len, texts))
    if most is not None and longest > most:
        raise TooLongError(f"the prompt has {longest} characters, but the model's context has room for at most {most}")
