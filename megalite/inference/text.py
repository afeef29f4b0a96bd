"""Generation from text to text.

Key idea: the text of new tokens is what they add to the prompt's text. Decoded on their own they could lose the blank
that joins the two, or a character whose first bytes the prompt holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megalite.config.errors import UserError
from megalite.data.tokenizers import IncrementalDetokenizer, Tokenizer
from megalite.inference.generate import stream
from megalite.inference.options import GenerationOptions
from megalite.models.gpt import GPTStage


@dataclass
class Completion:
    """What the model wrote after `prompt`: its `text` and its `tokens`, neither with the prompt nor with the
    end-of-document id."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt, as the tokenizer gives them.

    A prompt without ids starts from the end-of-document id, after which documents begin in training, or from the
    tokenizer's begin id where it has no other; a UserError where it has neither.
    """
    for number, prompt in enumerate(prompts, start=1):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not valid UTF-8") from None
    start = tokenizer.bos if tokenizer.eod is None else tokenizer.eod
    result = []
    for number, ids in enumerate(tokenizer.tokenize_batch(prompts), start=1):
        if not ids and start is None:
            raise UserError(f"prompt {number} is empty, and this tokenizer has no id to start from: give it some text")
        result.append(ids or [start])  # type: ignore[list-item]
    return result


def complete(
    model: GPTStage,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: GenerationOptions,
    *,
    show: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continue each prompt. `show(n, text)` gets what becomes known of prompt n (from 0): first the prompt itself, once
    it is accepted, then each piece of the continuation. Raises a UserError where a prompt is empty or too long."""
    encoded = encode_prompts(tokenizer, prompts)
    steps = stream(model, encoded, options, eod=tokenizer.eod)
    results = [Completion(prompt) for prompt in prompts]
    decoders = [IncrementalDetokenizer(tokenizer, ids) for ids in encoded]

    def add(number: int, text: str) -> None:
        results[number].text += text
        if show is not None and text:
            show(number, text)

    if show is not None:
        for number, prompt in enumerate(prompts):
            show(number, prompt)
    for step in steps:
        for number, token in enumerate(step):
            if token is not None:
                results[number].tokens.append(token)
                add(number, decoders[number].add(token))
    for number, decoder in enumerate(decoders):
        add(number, decoder.flush())
    return results
