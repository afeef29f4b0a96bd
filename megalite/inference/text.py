"""Between text and ids on both sides of generation."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.errors import UserError
from megalite.data.tokenizers import IncrementalDetokenizer, Tokenizer


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt, as the tokenizer gives them.

    A prompt without ids starts from the end-of-document id, after which every document but the first began in training,
    else from the tokenizer's begin id; a UserError where it has neither.
    """
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not valid UTF-8") from None
    start = tokenizer.bos if tokenizer.eod is None else tokenizer.eod
    encoded = tokenizer.tokenize_batch(texts)
    for number, ids in enumerate(encoded, start=1):
        if not ids and start is None:
            raise UserError(f"prompt {number} is empty, and this tokenizer has no id to start from: give it some text")
    return [ids or [start] for ids in encoded if ids or start is not None]


def decode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Text of `tokens` as it continues the text of `prompt`: with the blank between the two where there is one."""
    decoder = IncrementalDetokenizer(tokenizer, prompt)
    return "".join(map(decoder.add, tokens)) + decoder.flush()
