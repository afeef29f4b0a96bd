"""Trains a SentencePiece tokenizer from which every text comes back exactly, but for U+2581, the library's own sign
for a blank, which comes back as one.

The key idea: nothing is normalised. No prefix is added, blanks and newlines stay and may form pieces of their own
(indentation), every digit is a piece, and characters too rare for the vocabulary fall back to bytes. So English,
Chinese and code need no settings of their own.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megalite.config.errors import FlagError, UserError
from megalite.data.text_input import TEXT_DOCUMENTS, check_keys, expand_inputs, read_documents
from megalite.data.tokenizer_base import load_library
from megalite.files.atomic import replacing

PIECE_BYTES = 4096  # text is learned from in pieces of about this size, cut at line starts
LEAST_VOCAB_SIZE = 260


@dataclass(frozen=True)
class TrainingOptions:
    """See the flags of `tools/train_tokenizer.py`. `max_bytes`: text learned from, spread evenly over the corpus."""

    inputs: Sequence[str]
    output_prefix: str
    vocab_size: int
    json_keys: Sequence[str] = ("text",)
    model_type: str = "bpe"
    character_coverage: float = 0.9995
    max_bytes: int = 100_000_000
    text_documents: str = TEXT_DOCUMENTS[0]
    verbose: bool = False


def train_tokenizer(options: TrainingOptions) -> str:
    """Writes `PREFIX.model` and returns its path. The same input and options give the same file.

    Ids: 0 unknown (never used), 1 `<s>`, 2 `</s>` (the EOD), 3 to 258 the bytes, then pieces. Raises FlagError for
    bad options and UserError for input that can't be read or doesn't suit the vocabulary size.
    """
    if options.vocab_size < LEAST_VOCAB_SIZE:
        raise FlagError(
            f"--vocab-size {options.vocab_size} must be at least {LEAST_VOCAB_SIZE}: 3 special ids, 256 bytes, and more"
        )
    if not 0.9 <= options.character_coverage <= 1:
        raise FlagError(f"--character-coverage {options.character_coverage}: must be from 0.9 to 1")
    paths = expand_inputs(options.inputs)
    check_keys(paths, options.json_keys)
    documents = read_documents(paths, options.json_keys, options.text_documents)
    texts = itertools.chain.from_iterable(document.texts for document in documents)
    sample = even_sample(itertools.chain.from_iterable(map(pieces, texts)), options.max_bytes)
    model = _train(sample, options)
    path = f"{options.output_prefix}.model"
    with replacing(path) as stream:
        stream.write(model)
    return path


def pieces(text: str) -> Iterator[str]:
    """A text cut into parts of up to about PIECE_BYTES, at line starts where there are any; joined they equal it."""
    part, size = "", 0
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        for start in range(0, len(line), PIECE_BYTES // 4):
            bit = line[start : start + PIECE_BYTES // 4]
            length = len(bit.encode())
            if part and size + length > PIECE_BYTES:
                yield part
                part, size = "", 0
            part, size = part + bit, size + length
    if part:
        yield part


def even_sample(parts: Iterable[str], max_bytes: int) -> list[str]:
    """Every n-th part, with the smallest power of two n for which they fit in `max_bytes`. One pass, bounded memory."""
    kept: list[str] = []
    size, stride = 0, 1
    for number, part in enumerate(parts):
        if number % stride:
            continue
        kept.append(part)
        size += len(part.encode())
        while size > max_bytes and len(kept) > 1:
            kept = kept[::2]
            stride *= 2
            size = sum(len(part.encode()) for part in kept)
    return kept


def _train(sample: Sequence[str], options: TrainingOptions) -> bytes:
    library = load_library("sentencepiece")
    if not any(part.strip() for part in sample):
        raise UserError(f"--input {' '.join(options.inputs)}: there is no text to train on")
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=options.model_type,
            vocab_size=options.vocab_size,
            character_coverage=options.character_coverage,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=2 * PIECE_BYTES,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=4,  # fixed: sums over threads decide the unigram model's last bits
            minloglevel=0 if options.verbose else 2,
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), options, sum(len(part.encode()) for part in sample))) from None
    return model.getvalue()


def _explain(message: str, options: TrainingOptions, size: int) -> str:
    if found := re.search(r"value <= (\d+)", message):
        return (
            f"--vocab-size {options.vocab_size}: {size:,} bytes of text give at most {found[1]} pieces; "
            f"lower it to {found[1]} or give more text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {options.vocab_size}: this text's characters and the 256 bytes need at least {found[1]}; "
            "raise it, or lower --character-coverage so that more characters fall back to bytes"
        )
    return f"SentencePiece can't train on this input: {message.splitlines()[0]}"
