"""Prompt and continuation are one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megalite.config.errors import UserError
from megalite.data.tokenizers import NullTokenizer, SentencePieceTokenizer, Tokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import StopStrings, Writing, encode_prompts
from tests.data.corpora import sentencepiece_model
from tests.helpers import FP32, LLAMA, tiny_model
from tests.inference.checkpoints import generate, loaded_of

SAMPLED = GenerationOptions(max_new_tokens=30, temperature=2.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_model(tmp_path_factory.mktemp("tokenizer")))


class Words(Tokenizer):
    """Letters as ids, with neither begin nor end."""

    vocab_size = 128

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def loaded(tokenizer: SentencePieceTokenizer) -> LoadedModel:
    model = tiny_model(single_process_mesh(), FP32, vocab_size=tokenizer.vocab_size, init_method_std=0.4, **LLAMA)
    return loaded_of(model, tokenizer)


def write(loaded: LoadedModel, prompts: list[str], options: GenerationOptions = SAMPLED, **more: Any) -> Writing:
    return Writing(loaded, encode_prompts(loaded.tokenizer, prompts), options, stop=loaded.ends, **more)


def test_a_continuation_is_the_text_of_the_ids_after_its_prompt(loaded: LoadedModel) -> None:
    prompts = ["The quick brown", "今天天气", "def add(", "👍"]
    writing = write(loaded, prompts)
    pieces = list(writing)
    ids = encode_prompts(loaded.tokenizer, prompts)
    assert [one.tokens for one in writing.results] == generate(loaded.model, ids, SAMPLED, stop=loaded.ends)
    for number, (result, prompt, start) in enumerate(zip(writing.results, prompts, ids, strict=True)):
        assert "".join(texts[number] for texts in pieces) == result.text
        assert prompt + result.text == loaded.tokenizer.detokenize([*start, *result.tokens])
        assert result.finish == ("length" if len(result.tokens) == 30 else "stop")


def test_a_text_ends_before_a_stop_string_however_it_is_cut_into_tokens(loaded: LoadedModel) -> None:
    free = write(loaded, ["The"])
    list(free)
    text = free.results[0].text
    assert len(text) > 12
    for stop in (text[5:7], text[5:12]):
        writing = write(loaded, ["The"], stop_strings=["never", stop])
        shown = "".join(texts[0] for texts in writing)
        assert shown == writing.results[0].text == text[: text.index(stop)]
        assert writing.results[0].finish == "stop"
        assert len(writing.results[0].tokens) < len(free.results[0].tokens)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known() -> None:
    strings = StopStrings(["abcd", "ce"])
    assert [strings.add(part) for part in ("xab", "c", "c", "f")] == ["x", "", "abc", "cf"]
    assert (strings.add("ab"), strings.flush(), strings.found) == ("", "ab", False)
    strings = StopStrings(["abcd", "ce"])
    assert (strings.add("zabce"), strings.add("more"), strings.flush(), strings.found) == ("zab", "", "", True)


def test_an_empty_prompt_starts_a_document_and_others_are_joined_to_what_follows() -> None:
    tokenizer = NullTokenizer(130)
    assert encode_prompts(tokenizer, ["", "5 6", "  "]) == [[130], [5, 6], [130]]
    loaded = loaded_of(tiny_model(single_process_mesh(), FP32), tokenizer)
    for prompt, blank in (("", ""), ("5 6", " ")):
        writing = write(loaded, [prompt], GenerationOptions(max_new_tokens=5))
        list(writing)
        assert writing.results[0].text == blank + " ".join(map(str, writing.results[0].tokens))


def test_an_empty_prompt_needs_an_id_to_start_from_and_every_prompt_is_text() -> None:
    tokenizer = Words()
    with pytest.raises(UserError, match="prompt 2 is empty"):
        encode_prompts(tokenizer, ["a", ""])
    tokenizer.bos = 2
    assert encode_prompts(tokenizer, [""]) == [[2]]
    with pytest.raises(UserError, match="prompt 1 is not valid UTF-8"):
        encode_prompts(tokenizer, ["\udc80"])
