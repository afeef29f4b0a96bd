"""What a vocabulary says before any text is read: ids that mean nothing, and how much text an id can stand for.

Key idea: an embedding table may be larger than the vocabulary (rows added to make a round number), and a vocabulary may
have holes. What such an id would mean nobody knows, so generation never chooses one.
"""

from __future__ import annotations

import unicodedata

from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizer_json import TokenizersLibrary
from megalite.data.tokenizers import SentencePieceTokenizer, TikTokenizer

# Blanks at all places, and characters that normal forms change or small vocabularies lack: what keeps this drops none.
_PROBE = " A  b\t\n \u2003\ufb01 \uff21 e\u0301 \u200b\U0001f9ff\U00020000  "
_COMPOSED = 4  # characters at most that NFC makes one of (Unicode Standard Annex 15, expansion of NFD)


def unknown_ids(tokenizer: Tokenizer, rows: int) -> list[int]:
    """The ids below `rows` that the tokenizer doesn't know, in order."""
    known = _pieces(tokenizer) or range(tokenizer.vocab_size)
    return [one for one in range(rows) if one not in known]


def characters_per_id(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one id can stand for; None where that isn't known, as with a tokenizer that
    drops blanks or writes one id for any run of unknown characters."""
    if isinstance(tokenizer, TokenizersLibrary):
        added = tokenizer.backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return None
    longest = max(map(len, _pieces(tokenizer).values()), default=0)
    kept = tokenizer.detokenize(tokenizer.tokenize(_PROBE)) if longest else ""
    if kept == _PROBE:
        return longest
    return longest * _COMPOSED if kept == unicodedata.normalize("NFC", _PROBE) else None


def _pieces(tokenizer: Tokenizer) -> dict[int, str | bytes]:
    """Each id as the vocabulary writes it, none shorter than the text it stands for; empty where ids are the text."""
    if isinstance(tokenizer, TokenizersLibrary):
        return {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    if isinstance(tokenizer, TikTokenizer):
        encoding = tokenizer.encoding
        tokens = (*encoding.token_byte_values(), *encoding.special_tokens_set)
        return {encoding.encode_single_token(token): token for token in tokens}
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {one: tokenizer.processor.id_to_piece(one) for one in range(tokenizer.vocab_size)}
    return {}
