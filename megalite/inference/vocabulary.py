"""Which rows of a model's vocabulary a tokenizer has no id for.

Key idea: an embedding table may be larger than the vocabulary (rows added to make a round number), and a vocabulary may
have holes. What such an id would mean nobody knows, so generation never chooses one.
"""

from __future__ import annotations

from megalite.data.tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer, TikTokenizer, Tokenizer


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
