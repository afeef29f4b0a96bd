"""What a vocabulary says before any text is read: ids that mean nothing, and how much text an id can stand for.

Key idea: an embedding table may be larger than the vocabulary (rows added to make a round number), and a vocabulary may
have holes. What such an id would mean nobody knows, so generation never chooses one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

from megalite.data.tokenizers import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)

# Blanks at all places, and characters that normal forms change or small vocabularies lack: what keeps this drops none.
_PROBE = " A  b\t\n \u2003\ufb01 \uff21 e\u0301 \u200b\U0001f9ff\U00020000  "
_COMPOSED = 4  # characters at most that NFC makes one of (Unicode Standard Annex 15, expansion of NFD)


def unknown_ids(tokenizer: Tokenizer, rows: int) -> list[int]:
    """The ids below `rows` that the tokenizer doesn't know, in order."""
    known = set(range(min(rows, tokenizer.vocab_size)))
    if isinstance(tokenizer, HuggingFaceTokenizer | GPT2BPETokenizer):
        known &= set(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    elif isinstance(tokenizer, TikTokenizer):
        known = {one for one in known if _has_bytes(tokenizer, one)}
    return [one for one in range(rows) if one not in known]


def _has_bytes(tokenizer: TikTokenizer, token: int) -> bool:
    try:
        tokenizer.encoding.decode_single_token_bytes(token)
    except KeyError:
        return False
    return True


def characters_per_id(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one id can stand for; None where that isn't known, as with a tokenizer that
    drops blanks or writes one id for any run of unknown characters."""
    if any(token.lstrip or token.rstrip for token in _added_tokens(tokenizer)):
        return None
    longest = max(map(len, _tokens(tokenizer)), default=0)
    kept = tokenizer.detokenize(tokenizer.tokenize(_PROBE)) if longest else ""
    if kept == _PROBE:
        return longest
    return longest * _COMPOSED if kept == unicodedata.normalize("NFC", _PROBE) else None


def _tokens(tokenizer: Tokenizer) -> Iterable[str | bytes]:
    """As the vocabulary writes them, none shorter than the text it stands for."""
    if isinstance(tokenizer, HuggingFaceTokenizer | GPT2BPETokenizer):
        return list(tokenizer.backend.get_vocab(with_added_tokens=True))
    if isinstance(tokenizer, TikTokenizer):
        return [*tokenizer.encoding.token_byte_values(), *tokenizer.encoding.special_tokens_set]
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [tokenizer.processor.id_to_piece(one) for one in range(tokenizer.vocab_size)]
    return []


def _added_tokens(tokenizer: Tokenizer) -> list[Any]:
    if isinstance(tokenizer, HuggingFaceTokenizer | GPT2BPETokenizer):
        return list(tokenizer.backend.get_added_tokens_decoder().values())
    return []
