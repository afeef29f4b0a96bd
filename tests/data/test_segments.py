"""Pieces of a text as ids: those of the whole text, cut where that is possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from megalite.config.errors import UserError
from megalite.data.segments import BOS_SIGN, EOD_SIGN, TextEncoder, TextSegment
from megalite.data.tokenizers import HuggingFaceTokenizer, NullTokenizer, SentencePieceTokenizer
from tests.data.chat_files import chat_tokenizer, put_template
from tests.data.corpora import SAMPLES, sentencepiece_model


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(chat_tokenizer(tmp_path_factory.mktemp("chat"))))


def halves(text: str, cut: int) -> list[TextSegment]:
    return [TextSegment(text[:cut], False), TextSegment(text[cut:], True)]


def test_ids_of_the_whole_text_cut_where_a_token_ends(hf: HuggingFaceTokenizer) -> None:
    encoder = TextEncoder(hf)
    text = "The quick brown fox jumps over the lazy dog, and the dog"
    whole = hf.tokenize(text)
    for count in range(1, len(whole)):
        before, after = encoder.encode(halves(text, len(hf.detokenize(whole[:count]))))
        assert before.ids + after.ids == whole
        assert len(before.ids) == count
        assert (before.counted, after.counted) == (False, True)


def test_where_a_token_lies_across_the_cut_the_prompt_has_the_ids_that_generation_sees(
    hf: HuggingFaceTokenizer,
) -> None:
    text = "The quick brown"
    assert hf.detokenize(hf.tokenize(text)[:2]) != "The qui"
    before, after = TextEncoder(hf).encode(halves(text, 7))
    assert before.ids == hf.tokenize("The qui")
    assert after.ids == hf.tokenize("ck brown")


def test_what_the_tokenizers_own_template_adds_is_left_out(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path)
    plain = HuggingFaceTokenizer(str(folder))
    for template, before, after in (("<|begin|> $A", 1, 0), ("<|begin|> $A <|im_end|>", 1, 1), ("$A <|im_end|>", 0, 1)):
        tokenizer = HuggingFaceTokenizer(str(put_template(folder, template)))
        assert len(tokenizer.tokenize("")) == before + after
        encoder = TextEncoder(tokenizer)
        assert encoder.prefix == [plain.special["<|begin|>"]] * before
        for text in SAMPLES:
            assert encoder.ids(text) == plain.tokenize(text)


def test_a_prefixed_blank_is_added_once(tmp_path: Path) -> None:
    """A tokenizer that writes a blank before every text must not write one before every piece."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5}, [("▁", "a"), ("▁", "b")])
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(HuggingFaceTokenizer(str(tmp_path)))
    before, after = encoder.encode([TextSegment("a", False), TextSegment(" b", True)])
    assert (before.ids, after.ids) == ([4], [5])


def test_signs_become_ids_that_the_tokenizer_can_not_read_from_text(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path))
    encoder = TextEncoder(tokenizer)
    assert encoder.ids(f"{BOS_SIGN}fox{EOD_SIGN}{EOD_SIGN}") == [
        tokenizer.bos,
        *tokenizer.tokenize("fox"),
        tokenizer.eod,
        tokenizer.eod,
    ]
    assert TextEncoder(NullTokenizer(9)).ids(f"1 2{EOD_SIGN}") == [1, 2, 9]
    with pytest.raises(UserError, match="no begin-of-text id"):
        TextEncoder(NullTokenizer(9)).ids(BOS_SIGN)


def test_empty_pieces_are_left_out(hf: HuggingFaceTokenizer) -> None:
    assert len(TextEncoder(hf).encode([TextSegment("", False), TextSegment("a", True)])) == 1
