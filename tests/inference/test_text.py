"""Prompt and continuation are one text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megalite.config.errors import UserError
from megalite.data.tokenizers import NullTokenizer, SentencePieceTokenizer, Tokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.inference.generate import generate
from megalite.inference.options import GenerationOptions
from megalite.inference.text import complete, encode_prompts
from tests.data.corpora import sentencepiece_model
from tests.helpers import FP32, LLAMA, tiny_model

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


def test_a_completion_is_the_text_of_the_ids_after_its_prompt(tokenizer: SentencePieceTokenizer) -> None:
    model = tiny_model(single_process_mesh(), FP32, vocab_size=tokenizer.vocab_size, init_method_std=0.4, **LLAMA)
    prompts = ["The quick brown", "今天天气", "def add(", "👍"]
    results = complete(model, tokenizer, prompts, SAMPLED)
    ids = encode_prompts(tokenizer, prompts)
    assert [result.tokens for result in results] == generate(model, ids, SAMPLED, eod=tokenizer.eod)
    for result, prompt, start in zip(results, prompts, ids, strict=True):
        assert result.prompt == prompt
        assert result.prompt + result.text == tokenizer.detokenize([*start, *result.tokens])


def test_what_is_shown_joined_is_the_result(tokenizer: SentencePieceTokenizer) -> None:
    model = tiny_model(single_process_mesh(), FP32, vocab_size=tokenizer.vocab_size, init_method_std=0.4, **LLAMA)
    shown = ["", ""]

    def show(number: int, text: str) -> None:
        assert text
        shown[number] += text

    results = complete(model, tokenizer, ["The", "小明"], SAMPLED, show=show)
    assert shown == [result.prompt + result.text for result in results]


def test_an_empty_prompt_starts_a_document_and_others_are_joined_to_what_follows() -> None:
    tokenizer = NullTokenizer(130)
    assert encode_prompts(tokenizer, ["", "5 6", "  "]) == [[130], [5, 6], [130]]
    model = tiny_model(single_process_mesh(), FP32)
    for prompt, blank in (("", ""), ("5 6", " ")):
        (result,) = complete(model, tokenizer, [prompt], GenerationOptions(max_new_tokens=5))
        assert result.text == blank + " ".join(map(str, result.tokens))


def test_an_empty_prompt_starts_from_the_begin_id_where_there_is_no_end() -> None:
    tokenizer = Words()
    tokenizer.bos = 2
    assert encode_prompts(tokenizer, [""]) == [[2]]


def test_an_empty_prompt_is_refused_where_there_is_nothing_to_start_from() -> None:
    with pytest.raises(UserError, match="prompt 2 is empty"):
        encode_prompts(Words(), ["a", ""])


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="prompt 1 is not valid UTF-8"):
        encode_prompts(Words(), ["\udc80"])
