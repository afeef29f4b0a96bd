"""Tokenizers: text to ids and back, one small interface over four libraries.

The key idea: each kind is a thin class whose library is imported when it is built, so that a run needs only the one
that it uses. Byte-level kinds lose nothing: text survives the round trip.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megalite.config.check_run import tokenizer_problems
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TOKENIZER_NEEDS, TokenizerConfig
from megalite.data.tokenizer_base import MARK, Tokenizer, first_line, load_library, read_file
from megalite.data.tokenizer_json import GPT2BPETokenizer, HuggingFaceTokenizer

LONG_TEXT = 1 << 16  # characters that SentencePiece sees at once
SPACE_MARK = "\u2581"  # what SentencePiece writes for a space inside its pieces


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file (Kudo and Richardson 2018); `eod` is its `</s>`. Ids are the library's, which reads no
    control symbol from a text, and U+2581 as a blank."""

    def __init__(self, model: str) -> None:
        library = load_library("sentencepiece")
        content = read_file("--tokenizer-model", model)
        self.processor = library.SentencePieceProcessor()
        try:
            if not content:
                raise ValueError("it is empty")
            self.processor.LoadFromSerializedProto(content)
            self.vocab_size = int(self.processor.get_piece_size())
        except Exception as error:
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model ({first_line(error)})") from None
        self.eod, self.bos, self.pad = (
            i if i >= 0 else None for i in (self.processor.eos_id(), self.processor.bos_id(), self.processor.pad_id())
        )

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if max(map(len, texts), default=0) <= LONG_TEXT or not self._cuts_change_nothing:
            return self._encode(texts)
        return [list(itertools.chain.from_iterable(self._encode(list(self._parts(text))))) for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        batch: list[list[int]] = self.processor.encode(list(texts), out_type=int, num_threads=1)
        return batch

    @functools.cached_property
    def _cuts_change_nothing(self) -> bool:
        """Whether the model takes every text as it is and has no unknown characters, so that a long text, for which
        the library's time grows faster than the text, can be seen in parts."""
        exact = self.processor.decode(self.processor.encode(" a  b ")) == " a  b "
        prefixed = self.processor.encode_as_pieces("a")[0].startswith(SPACE_MARK)
        bytes_of_mark = (self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode())
        return exact and not prefixed and all(map(self.processor.is_byte, bytes_of_mark))

    def _parts(self, text: str) -> Iterator[str]:
        """The text cut where no piece can lie across: between two characters that are neighbours in no piece. Byte
        fallback leaves no unknown pieces, so the ids of the parts joined are those of the whole."""
        escaped = text.replace(" ", SPACE_MARK)
        start = 0
        while len(text) - start > LONG_TEXT:
            cut = start + LONG_TEXT
            while cut < len(text) and escaped[cut - 1 : cut + 1] in self._neighbours:
                cut += 1
            yield text[start:cut]
            start = cut
        yield text[start:]

    @functools.cached_property
    def _neighbours(self) -> set[str]:
        pieces = (self.processor.id_to_piece(i) for i in range(self.vocab_size))
        return {piece[n : n + 2] for piece in pieces for n in range(len(piece) - 1)}

    def _content(self) -> bytes:
        return bytes(self.processor.serialized_model_proto())

    def _decode(self, ids: list[int]) -> str:
        return str(self.processor.decode(ids))


# The two word patterns of --tiktoken-pattern, as alternatives. They decide ids, so they equal Megatron-LM's.
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TIKTOKEN_PATTERNS = {
    "v1": "|".join((_LEAD + r"+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")),
    "v2": "|".join(
        (
            _LEAD + _UPPER + "*" + _LOWER + "+",
            _LEAD + _UPPER + "+" + _LOWER + "*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


class TikTokenizer(Tokenizer):
    """BPE by tiktoken, from either of two kinds of file.

    Megatron's JSON list of `{"rank", "token_bytes", "token_str"}`: ids 0 to 999 are special (`<unk> <s> </s> <mask>
    <pad> <cls> <sep>`, then `<SPECIAL_7>` and so on), the ranks follow; `--vocab-size` (131,072) cuts the whole.
    Or a `.tiktoken` file, one base64 token and its rank a line: ranks are ids, and `<|endoftext|>` comes after the
    last.
    """

    SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
    SPECIAL_IDS = 1000
    DEFAULT_VOCAB_SIZE = 131_072

    def __init__(self, model: str, pattern: str | None = None, vocab_size: int | None = None) -> None:
        library = load_library("tiktoken")
        content = read_file("--tokenizer-model", model)
        try:
            if content.lstrip()[:1] == b"[":
                ranks, special = self._from_json(content, vocab_size)
                self.bos, self.eod, self.pad = special["<s>"], special["</s>"], special["<pad>"]
            else:
                ranks = _tiktoken_ranks(content)
                special = {"<|endoftext|>": max(ranks.values()) + 1}
                self.eod = special["<|endoftext|>"]
            self.special = self.added = special
            self._marked = re.compile(f"{MARK}{self._secret} ([0-9]+){MARK}")
            if missing := [i for i in range(256) if bytes([i]) not in ranks]:
                raise ValueError(f"there is no token for the single byte {missing[0]}")
            self._file, self._pattern = content, TIKTOKEN_PATTERNS[pattern or "v2"]
            self.encoding = library.Encoding(
                Path(model).stem,
                pat_str=self._pattern,
                mergeable_ranks=ranks,
                special_tokens=special,
            )
        except FlagError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"--tokenizer-model {model}: neither Megatron's JSON vocabulary nor a .tiktoken file "
                f"({first_line(error)})"
            ) from None
        self.vocab_size = int(self.encoding.max_token_value) + 1

    def _from_json(self, content: bytes, vocab_size: int | None) -> tuple[dict[bytes, int], dict[str, int]]:
        entries = json.loads(content)
        room = (vocab_size or self.DEFAULT_VOCAB_SIZE) - self.SPECIAL_IDS
        if vocab_size is not None and not 256 <= room <= len(entries):
            low, high = 256 + self.SPECIAL_IDS, len(entries) + self.SPECIAL_IDS
            raise FlagError(f"--vocab-size {vocab_size}: this TikTokenizer file allows {low} to {high}")
        ranks = {}
        for n, entry in enumerate(entries[:room]):
            if entry["rank"] != n:
                raise ValueError(f"entry {n} has rank {entry['rank']}")
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = n + self.SPECIAL_IDS
        if len(ranks) != min(room, len(entries)):
            raise ValueError("a token occurs twice")
        filler = (f"<SPECIAL_{i}>" for i in range(len(self.SPECIAL), self.SPECIAL_IDS))
        return ranks, {name: i for i, name in enumerate((*self.SPECIAL, *filler))}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenize_alone(texts, special=True)

    def tokenize_alone(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        if special:
            return [self.encoding.encode(text, allowed_special="all") for text in texts]
        return [self._plain(text) for text in texts]

    def _plain(self, text: str) -> list[int]:
        parts = self._marked.split(text)  # plain text and marked tokens in turn
        ids = self.encoding.encode_ordinary(parts[0])
        for number, plain in zip(parts[1::2], parts[2::2], strict=True):
            ids += [int(number), *self.encoding.encode_ordinary(plain)]
        return ids

    def _content(self) -> bytes:
        return self._pattern.encode() + self._file

    def _decode(self, ids: list[int]) -> str:
        try:
            return str(self.encoding.decode(ids))
        except KeyError as error:
            raise ValueError(f"id {first_line(error)} is not used in the vocabulary") from None


def _tiktoken_ranks(content: bytes) -> dict[bytes, int]:
    """Token bytes to rank from the lines of a `.tiktoken` file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} isn't a base64 token and a rank") from None
    if not ranks or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise ValueError("ranks are missing or not unique")
    return ranks


class NullTokenizer(Tokenizer):
    """Text is already ids, written in decimal with blanks between. Ids 0 to `vocab_size` - 1, and `eod` after them."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: what `--vocab-size` says, without the EOD; the attribute counts it."""
        if vocab_size < 1:
            raise FlagError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 1")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises UserError for a word that isn't an id of the vocabulary."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            wrong = next(word for word in text.split() if not word.isdecimal())
            raise UserError(
                f"NullTokenizer reads ids separated by spaces, and {wrong[:40]!r} is not an id: for text give a "
                "tokenizer (--tokenizer-type, --tokenizer-model); a Hugging Face folder without one uses NullTokenizer"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"id {i} is outside NullTokenizer's 0 to {self.vocab_size - 1}: raise --vocab-size")
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "TikTokenizer": TikTokenizer,
    "NullTokenizer": NullTokenizer,
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the flags describe.

    Raises FlagError for a missing or contradictory flag, UserError for a file that is missing, can't be read or isn't
    what its flag says, or whose library isn't installed.
    """
    kind = config.tokenizer_type
    if kind is None:
        raise FlagError(f"--tokenizer-type is missing: {', '.join(TOKENIZERS)}")
    for problem in tokenizer_problems(config):
        raise FlagError(problem)
    if config.parse_special_tokens and kind in ("NullTokenizer", "SentencePieceTokenizer"):
        raise FlagError(f"--parse-special-tokens: {kind} never reads special tokens from text; leave the flag out")
    values = [getattr(config, name) for name in TOKENIZER_NEEDS[kind]]
    if kind == "TikTokenizer":
        values += [config.tiktoken_pattern, config.vocab_size]
    tokenizer = TOKENIZERS[kind](*values)
    tokenizer.parse_special_tokens = config.parse_special_tokens
    if kind != "NullTokenizer" and config.vocab_size not in (None, tokenizer.vocab_size):
        raise FlagError(
            f"--vocab-size {config.vocab_size}, but the {kind} has {tokenizer.vocab_size} ids; leave the flag out"
        )
    return tokenizer


def require_eod(tokenizer: Tokenizer, flag: str) -> int:
    """The tokenizer's EOD id; a FlagError naming `flag`, which needs it, where there is none."""
    if tokenizer.eod is None:
        raise FlagError(
            f"{flag} needs a tokenizer with an end-of-document id, but this one has none: its files name no eos token"
        )
    return tokenizer.eod
