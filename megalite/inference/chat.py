"""Conversations with a model: prompts by its chat template, answers that end with the turn.

Key idea: at each turn the template alone writes the whole prompt from all messages, so that the model sees what it
saw in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megalite.config.errors import UserError
from megalite.data.chat_template import Chat, Message, load_chat
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import Writing, check_characters, check_text

HELP = "/reset starts a new conversation, /exit ends; Ctrl-C stops an answer"


class Dialogue:
    """How conversations with one model are held. `system`: a message that begins each. `ends`: ids that end an
    answer: those that end any text, and the template's end of turn."""

    def __init__(self, chat: Chat, ends: frozenset[int], system: str | None = None):
        self.chat, self.ends = chat, ends
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def prompt(self, messages: Sequence[Message], *, most: int | None = None) -> list[int]:
        """The ids after which the model answers. A UserError where the template refuses the messages.

        `most`: characters that it may make of them, see `check_characters`.
        """
        check_text([f"{message['role']} {message['content']}" for message in messages], "message", signs=True)
        segments = self.chat.template.prompt_segments(messages)
        check_characters(["".join(segment.text for segment in segments)], most)
        ids = self.chat.ids(segments)
        if not ids:
            raise UserError(f"the chat template {self.chat.template.name} writes no text for this conversation")
        return ids


def open_dialogue(loaded: LoadedModel, template: str | None, system: str | None = None) -> Dialogue:
    """`template`: as `load_chat` takes it; None for the model's own. Raises what `load_chat` does."""
    tokenizer = loaded.config.tokenizer
    chat = load_chat(template, loaded.tokenizer, tokenizer.tokenizer_model or tokenizer.vocab_file)
    try:
        ends = loaded.ends | {chat.end_of_turn()}
    except UserError:  # its template refuses even the plainest conversation, or hides what an answer is
        ends = loaded.ends
    return Dialogue(chat, ends, system)


def converse(
    loaded: LoadedModel,
    dialogue: Dialogue,
    options: GenerationOptions,
    *,
    read: Callable[[], str],
    show: Callable[[str], None],
) -> None:
    """Talk until `/exit` or the end of the input.

    `read` returns the next line, or raises EOFError; `show` gets every piece of text as it comes. A turn's draws
    depend on the seed and on the turn's number.
    """
    messages, turn = list(dialogue.opening), 0
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(dialogue.opening)
            show("(a new conversation)\n")
        elif line.startswith("/"):
            show(f"({HELP})\n")
        elif line:
            try:
                said: Message = {"role": "user", "content": line}
                answer = _answer(loaded, dialogue, [*messages, said], options, turn, show)
                messages += [said, {"role": "assistant", "content": answer}]
                turn += 1
            except UserError as error:
                show(f"({error})\n")


def _answer(
    loaded: LoadedModel,
    dialogue: Dialogue,
    messages: Sequence[Message],
    options: GenerationOptions,
    turn: int,
    show: Callable[[str], None],
) -> str:
    """The model's answer, shown as it comes. KeyboardInterrupt cuts it short."""
    prompt = dialogue.prompt(messages)
    room = loaded.context - len(prompt)
    if room < 1:
        raise UserError(
            f"the conversation has {len(prompt)} tokens, and the model's context is {loaded.context}: "
            "/reset starts a new conversation"
        )
    options = dataclasses.replace(options, max_new_tokens=min(options.max_new_tokens, room))
    writing = Writing(loaded, [prompt], options, stop=dialogue.ends, indices=[turn])
    (result,) = writing.results
    try:
        for (text,) in writing:
            show(text)
        show("\n")
        if result.finish == "length":
            show(f"(cut after {len(result.tokens)} tokens: --max-new-tokens, or the end of the context)\n")
    except KeyboardInterrupt:
        show("\n(cut short)\n")
    return result.text
