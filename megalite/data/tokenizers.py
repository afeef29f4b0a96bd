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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.tokenizer_base import IncrementalDetokenizer, Tokenizer, first_line, load_library, read_file

__all__ = [
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "IncrementalDetokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "require_eod",
]

LONG_TEXT = 1 << 16  # characters that SentencePiece sees at once
SPACE_MARK = "\u2581"  # what SentencePiece writes for a space inside its pieces


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file (Kudo and Richardson 2018); `eod` is its `</s>`."""

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
        self._mark_ids = self._byte_ids_of_mark()

    def _byte_ids_of_mark(self) -> list[int] | None:
        """U+2581 as byte pieces, where the model keeps every text exactly but for that character; else None."""
        ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        exact = self.processor.decode(self.processor.encode(" a  b ")) == " a  b "
        prefixed = self.processor.encode_as_pieces("a")[0].startswith(SPACE_MARK)
        return ids if exact and not prefixed and all(map(self.processor.is_byte, ids)) else None

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._mark_ids is None:
            return self._encode(texts)
        plain = [SPACE_MARK not in text and len(text) <= LONG_TEXT for text in texts]
        short = iter(self._encode([text for text, is_plain in zip(texts, plain, strict=True) if is_plain]))
        return [next(short) if is_plain else self._careful(text) for text, is_plain in zip(texts, plain, strict=True)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        batch: list[list[int]] = self.processor.encode(list(texts), out_type=int, num_threads=1)
        return batch

    def _careful(self, text: str) -> list[int]:
        """Ids of a text that holds U+2581, which the library would turn into a space (as bytes it survives), or that
        is so long that the library, whose time grows faster than the text, had better see it in parts."""
        ids: list[int] = []
        for n, part in enumerate(text.split(SPACE_MARK)):
            ids += (self._mark_ids or []) if n else []
            ids += itertools.chain.from_iterable(self._encode(list(self._parts(part))))
        return ids

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

    def _decode(self, ids: list[int]) -> str:
        return str(self.processor.decode(ids))


class _TokenizersLibrary(Tokenizer):
    """What the kinds built on the `tokenizers` library share."""

    def _set_backend(self, backend: Any) -> None:
        backend.no_truncation()  # a tokenizer.json may ask for both; neither belongs in a corpus
        backend.no_padding()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have holes

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:  # one text needs none of the library's threads
            return [self.backend.encode(texts[0]).ids]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def _decode(self, ids: list[int]) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=False))


class HuggingFaceTokenizer(_TokenizersLibrary):
    """A Hugging Face `tokenizer.json`, or a folder that holds one.

    As with `transformers`, special tokens written out in a text become their ids, and the file's own template applies
    (such as Llama 3's leading `<|begin_of_text|>`).
    """

    def __init__(self, path: str) -> None:
        library = load_library("tokenizers")
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        content = read_file("--tokenizer-model", str(file))
        try:
            backend = library.Tokenizer.from_buffer(content)
        except Exception as error:
            raise UserError(f"--tokenizer-model {file}: not a tokenizer.json ({first_line(error)})") from None
        self._set_backend(backend)
        end = (
            "</s>",
            "<|endoftext|>",
            "<|end_of_text|>",
            "<|eos|>",
            "<eos>",
            "[EOS]",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        )
        self.eod = self._special(file.parent, "eos_token", end)
        self.bos = self._special(file.parent, "bos_token", ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"))
        self.pad = self._special(file.parent, "pad_token", ("<pad>", "[PAD]"))

    def _special(self, folder: Path, role: str, usual: tuple[str, ...]) -> int | None:
        """The id of a role: as the files beside tokenizer.json say, else by its usual names."""
        for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
            if not file.is_file():
                continue
            try:
                value = json.loads(file.read_text("utf-8-sig"))[role]
            except KeyError:
                continue
            except (ValueError, TypeError) as error:
                raise UserError(f"{file}: not a JSON object ({first_line(error)})") from None
            name = value.get("content") if isinstance(value, dict) else value
            if name is None:
                continue
            if not isinstance(name, str):
                raise UserError(f"{file}: {role} is {name!r}, which is no token")
            found: int | None = self.backend.token_to_id(name)
            if found is None:
                raise UserError(f"{file}: {role} is {name!r}, which tokenizer.json does not hold")
            return found
        ids = (self.backend.token_to_id(name) for name in usual)
        return next((i for i in ids if i is not None), None)


class GPT2BPETokenizer(_TokenizersLibrary):
    """GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt; `<|endoftext|>` is `eod`."""

    END = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        library = load_library("tokenizers")
        for name, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            read_file(name, path)
        try:
            backend = library.Tokenizer(library.models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:
            raise UserError(
                f"--vocab-file {vocab_file}, --merge-file {merge_file}: not GPT-2's vocabulary and merges "
                f"({first_line(error)})"
            ) from None
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([self.END])
        self._set_backend(backend)
        self.eod = backend.token_to_id(self.END)


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
    last. Special tokens written out in a text become their ids.
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
            if missing := [i for i in range(256) if bytes([i]) not in ranks]:
                raise ValueError(f"the single byte {missing[0]} is no token")
            self.encoding = library.Encoding(
                Path(model).stem,
                pat_str=TIKTOKEN_PATTERNS[pattern or "v2"],
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
        return [self.encoding.encode(text, allowed_special="all") for text in texts]

    def _decode(self, ids: list[int]) -> str:
        try:
            return str(self.encoding.decode(ids))
        except KeyError as error:
            raise ValueError(f"id {first_line(error)} is a hole in the vocabulary") from None


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
        raise ValueError("it has no ranks, or one of them twice")
    return ranks


class NullTokenizer(Tokenizer):
    """Text is already ids, written in decimal with blanks between. Ids 0 to `vocab_size` - 1, and `eod` after them."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: what `--vocab-size` says, without the EOD; the attribute counts it."""
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
                f"NullTokenizer reads ids separated by blanks, and {wrong[:40]!r} is none: text needs a tokenizer "
                "(--tokenizer-type, --tokenizer-model), and a Hugging Face folder without one gives NullTokenizer"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"id {i} is outside NullTokenizer's 0 to {self.vocab_size - 1}: raise --vocab-size")
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the flags describe.

    Raises FlagError for a missing or contradictory flag, UserError for a file that is missing, can't be read or isn't
    what its flag says, or whose library isn't installed.
    """
    kind = config.tokenizer_type
    if kind is None:
        raise FlagError(
            "--tokenizer-type is missing: SentencePieceTokenizer, HuggingFaceTokenizer, GPT2BPETokenizer, "
            "TikTokenizer or NullTokenizer"
        )
    tokenizer: Tokenizer
    if kind == "NullTokenizer":
        if _needed(config, "vocab_size") < 1:
            raise FlagError(f"--vocab-size {config.vocab_size}: NullTokenizer needs at least 1")
        return NullTokenizer(_needed(config, "vocab_size"))
    if kind == "SentencePieceTokenizer":
        tokenizer = SentencePieceTokenizer(_needed(config, "tokenizer_model"))
    elif kind == "HuggingFaceTokenizer":
        tokenizer = HuggingFaceTokenizer(_needed(config, "tokenizer_model"))
    elif kind == "GPT2BPETokenizer":
        tokenizer = GPT2BPETokenizer(_needed(config, "vocab_file"), _needed(config, "merge_file"))
    elif kind == "TikTokenizer":
        tokenizer = TikTokenizer(_needed(config, "tokenizer_model"), config.tiktoken_pattern, config.vocab_size)
    else:
        raise FlagError(f"--tokenizer-type {kind} is unknown")
    if config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise FlagError(
            f"--vocab-size {config.vocab_size}, but the {kind} has {tokenizer.vocab_size} ids; leave it out"
        )
    return tokenizer


def require_eod(tokenizer: Tokenizer, flag: str) -> int:
    """The tokenizer's EOD id; a FlagError naming `flag`, which needs it, where there is none."""
    if tokenizer.eod is None:
        raise FlagError(
            f"{flag} needs a tokenizer with an end-of-document id, and this one has none: its files name no eos token"
        )
    return tokenizer.eod


def _needed(config: TokenizerConfig, field: str) -> Any:
    value = getattr(config, field)
    if value is None:
        raise FlagError(f"--tokenizer-type {config.tokenizer_type} needs --{field.replace('_', '-')}")
    return value
