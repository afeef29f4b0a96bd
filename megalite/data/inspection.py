"""Says what a pair of token files holds. The key idea: lengths come from the index alone; only the documents that are
shown are read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from megalite.config.errors import FlagError, UserError
from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.origin import origin_name, read_origin
from megalite.data.tokenizers import Tokenizer

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def describe_dataset(prefix: str, tokenizer: Tokenizer | None, documents: int, tokens: int) -> Iterator[str]:
    """Lines: header, counts, lengths of documents, and of the first `documents` up to `tokens` ids, with their text
    where there is a tokenizer. Raises UserError for files that are damaged or that the tokenizer can't have written."""
    if documents < 0 or tokens < 1:
        raise FlagError(f"--documents {documents} --tokens {tokens}: they must be at least 0 and 1")
    data = IndexedDataset(prefix)
    for problem in data.problems():
        raise UserError(f"{problem}; copy both files again or write them again")
    for path in (bin_path(prefix), idx_path(prefix)):
        yield f"{path}: {os.path.getsize(path):,} bytes"
    counts = f"{len(data):,} sequences, {data.num_documents:,} documents, {data.num_tokens:,} tokens"
    yield f"dtype {data.dtype.name}, {counts}"
    if origin := read_origin(prefix):
        yield f"written with the tokenizer {origin_name(origin)}"
    if not data.num_documents:
        return
    ends = np.concatenate([[0], np.cumsum(data.sequence_lengths, dtype=np.int64)])
    lengths = np.diff(ends[data.document_indices])
    points = np.quantile(lengths, QUANTILES, method="nearest")
    shares = ", ".join(f"{100 * q:.0f} %: {int(point):,}" for q, point in zip(QUANTILES, points, strict=True))
    yield f"tokens in a document: mean {lengths.mean():,.1f}; {shares}; empty: {int((lengths == 0).sum()):,}"
    for number in range(min(documents, data.num_documents)):
        first, last = int(data.document_indices[number]), int(data.document_indices[number + 1])
        ids = [int(i) for n in range(first, last) for i in data.get(n, 0, min(tokens, int(data.sequence_lengths[n])))]
        yield f"document {number}, {int(lengths[number]):,} tokens, ids: {' '.join(map(str, ids[:tokens]))}"
        if tokenizer is not None:
            yield f"document {number}, text: {_text(tokenizer, ids[:tokens], prefix)!r}"


def _text(tokenizer: Tokenizer, ids: list[int], prefix: str) -> str:
    try:
        return tokenizer.detokenize(ids)
    except ValueError as error:
        raise UserError(f"{prefix}: {error}; it was written with another tokenizer") from None
