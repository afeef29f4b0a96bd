"""A conversation: each turn sees those before it, and ends where the template's turns end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.config.errors import FlagError
from megalite.inference.chat import Dialogue, converse, open_dialogue
from megalite.inference.load import LoadedModel, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from tests.inference.checkpoints import generate, save_hf

OPTIONS = GenerationOptions(max_new_tokens=12, temperature=3.0, seed=4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_hf(tmp_path_factory.mktemp("hf"))
    return load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})


def talk(loaded: LoadedModel, dialogue: Dialogue, *lines: str, options: GenerationOptions = OPTIONS) -> list[str]:
    """What is shown after each line."""
    said: Iterator[str] = iter(lines)
    shown: list[str] = []

    def read() -> str:
        shown.append("")
        line = next(said, None)
        if line is None:
            raise EOFError
        return line

    def show(text: str) -> None:
        shown[-1] += text

    converse(loaded, dialogue, options, read=read, show=show)
    return shown


def expected(loaded: LoadedModel, dialogue: Dialogue, turns: list[str]) -> list[str]:
    """The answers, made one by one from the template's prompts."""
    messages, answers = list(dialogue.opening), []
    for number, line in enumerate(turns):
        messages.append({"role": "user", "content": line})
        ids = dialogue.chat.prompt(messages)
        (new,) = generate(loaded.model, [ids], OPTIONS, stop=dialogue.ends, unknown=loaded.unknown, indices=[number])
        text = loaded.tokenizer.detokenize([*ids, *new])[len(loaded.tokenizer.detokenize(ids)) :]
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    return answers


def test_each_answer_follows_from_the_whole_conversation(loaded: LoadedModel) -> None:
    dialogue = open_dialogue(loaded, None, "Be brief.")
    turns = ["What's 2 + 2?", "今天天气很好", "again"]
    for found, answer in zip(talk(loaded, dialogue, *turns), expected(loaded, dialogue, turns), strict=False):
        assert found.split("\n(cut after")[0].rstrip("\n") == answer.rstrip("\n")


def test_reset_begins_anew_and_exit_ends(loaded: LoadedModel) -> None:
    dialogue = open_dialogue(loaded, None)
    greedy = GenerationOptions(max_new_tokens=6)
    first, blank, reset, again, _, _ = talk(
        loaded, dialogue, "Hello", "  ", "/reset", "Hello", "/what", "/exit", "never", options=greedy
    )
    assert first == again != ""
    assert (blank, reset) == ("", "(a new conversation)\n")


def test_a_turn_ends_at_the_end_of_turn_of_the_template(loaded: LoadedModel) -> None:
    dialogue = open_dialogue(loaded, "chatml")
    assert loaded.tokenizer.tokenize("<|im_end|>")[0] in dialogue.ends


def test_a_conversation_longer_than_the_context_is_told_and_the_next_one_goes_on(loaded: LoadedModel) -> None:
    dialogue = open_dialogue(loaded, None)
    long, reset, short = talk(loaded, dialogue, "word " * 300, "/reset", "Hello")[:3]
    assert "the model's context is 256: /reset starts a new conversation" in long
    assert "context" not in short.split("\n(cut after")[0]


def test_an_interrupt_cuts_the_answer_short_and_the_conversation_goes_on(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialogue, lines, shown = open_dialogue(loaded, None), iter(["Hello", "/exit"]), []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    converse(loaded, dialogue, OPTIONS, read=lambda: next(lines), show=show)
    assert shown[-1] == "\n(cut short)\n"


def test_a_model_without_a_template_is_told_what_to_give(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, template=False)
    bare = load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})
    with pytest.raises(FlagError, match="--chat-template"):
        open_dialogue(bare, None)
    assert open_dialogue(bare, "chatml").ends
